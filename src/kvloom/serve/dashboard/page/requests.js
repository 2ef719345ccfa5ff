// Recent requests, and the explanation of one: hits by tier, and the miss reason.

import { byId, compact, count, h, percent, plural, seconds, table } from "./dom.js";

const HUES = { device: "blue", pool: "blue", host: "green", disk: "orange" };
const REST = ["pink", "sky", "yellow"];
const hue = (tier, i) => HUES[tier] ?? REST[i % REST.length];

export class Requests {
  constructor() {
    this.dialog = byId("explanation");
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    this.dialog.addEventListener("close", () => {
      byId("requests-table").querySelector(`tr[data-key="${CSS.escape(this.opened ?? "")}"] button`)?.focus();
      this.opened = null;
    });
  }

  /** `records` is null if the server keeps none. */
  draw(records) {
    if (records === null) {
      byId("requests-about").textContent = "Request records are disabled.";
      return;
    }
    this.records = new Map(records.map((record) => [record.id, record]));
    byId("requests-about").textContent = records.length ? "Select one to see why it hit or missed." : "None yet.";
    table(byId("requests-table"), "Recent requests", [["request"], ["tenant"], ["prompt, cached", 1], ["first token", 1], ["finished"]], records.map((record) => ({
      key: record.id, print: `${record.state} ${record.output_tokens} ${record.ttft_s} ${record.cached_tokens}`,
      cells: () => [
        h("button", { type: "button", class: "mono", "aria-haspopup": "dialog", "aria-label": `Explain request ${record.id}`, onclick: () => this.open(record.id) }, short(record.id)),
        record.tenant || "everyone", this.found(record), seconds(record.ttft_s), record.finish_reason ?? record.state,
      ],
    })));
    if (this.opened && this.dialog.open) {
      const record = this.records.get(this.opened);
      if (record && this.print !== JSON.stringify(record)) this.fill(record);
    }
  }

  found(record) {
    const share = record.prompt_tokens ? (record.cached_tokens ?? 0) / record.prompt_tokens : 0;
    return [`${compact(record.prompt_tokens)} · ${percent(share)}`, h("span", { class: "cached", "aria-hidden": "true" }, h("i", { style: { width: `${100 * share}%` } }))];
  }

  open(id) {
    this.opened = id;
    this.fill(this.records.get(id));
    this.dialog.showModal();
  }

  fill(record) {
    this.print = JSON.stringify(record);
    const hits = record.hits ?? [];
    const found = hits.map((hit, i) => ({ ...hit, hue: hue(hit.tier, i) })).filter((hit) => hit.tokens > 0);
    const part = (tokens) => `${(100 * tokens) / Math.max(1, record.prompt_tokens)}%`;
    const rest = Math.max(0, record.prompt_tokens - found.reduce((sum, hit) => sum + hit.tokens, 0));
    const facts = [
      ["tenant", record.tenant || "everyone"], ["state", record.state], ["waited", seconds(record.queue_s)], ["first token after", seconds(record.ttft_s)],
      ["total time", seconds(record.total_s)], ["output tokens", count(record.output_tokens)], ["preempted", plural(record.preemptions ?? 0, "time")],
      ["finish reason", record.finish_reason ?? "not yet"],
    ];
    const closes = h("button", { type: "button", autofocus: true, onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(
      h("h2", { id: "explanation-title" }, "Request ", h("span", { class: "mono" }, record.id)),
      h("p", { class: "quiet" }, arrived(record.arrived)),
      h("p", { class: "why" }, sentence(record)),
      h("div", { class: "strip", role: "img", "aria-label": "The prompt: cached and computed tokens" },
        found.map((hit) => h("i", { style: { width: part(hit.tokens), background: `var(--${hit.hue})` } }))),
      h("ul", { class: "marks" },
        found.map((hit) => h("li", {}, h("i", { class: "swatch", style: { background: `var(--${hit.hue})` } }), `${count(hit.tokens)} from ${hit.tier}`)),
        h("li", {}, h("i", { class: "swatch", style: { background: "var(--free)" } }), `${count(rest)} computed`)),
      h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      closes,
    );
    if (this.dialog.open) closes.focus();
  }
}

/** The end of a long id, which is unique enough. */
const short = (id) => (String(id).length > 12 ? `…${String(id).slice(-8)}` : String(id));

function arrived(at) {
  if (!at) return "";
  return `arrived ${new Date(at * 1000).toLocaleTimeString()}`;
}

/** The server's explanation, or one from its numbers. */
function sentence(record) {
  if (record.stopped?.text) return record.stopped.text;
  return record.state === "waiting" ? `Its ${plural(record.prompt_tokens, "prompt token")} have not been looked up yet.`
    : `Of ${plural(record.prompt_tokens, "prompt token")}, ${count(record.cached_tokens ?? 0)} were in the cache.`;
}
