// Recent requests, and the explanation of one: hits by tier, the miss reason, and its phases as a waterfall.

import { byId, compact, count, h, marks, nameOf, percent, plural, seconds, table, tierHue, tierWord } from "./dom.js";
import { ask } from "./shell.js";

const COLUMNS = [["request"], ["tenant", 0, "wide"], ["prompt", 1, "middle"], ["cached", 1], ["from", 0, "middle"], ["computed", 1, "wide"], ["lookup ended", 0],
  ["first token", 1], ["total", 1, "wide"], ["output", 1, "wide"], ["finished", 0, "middle"]];

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
    table(byId("requests-table"), "Recent requests", COLUMNS, records.map((record) => ({
      key: record.id, print: `${record.state} ${record.output_tokens} ${record.ttft_s} ${record.cached_tokens} ${record.stopped?.reason}`,
      cells: () => [
        h("button", { type: "button", class: "mono", "aria-haspopup": "dialog", "aria-label": `Explain request ${record.id}`, onclick: () => this.open(record.id) }, short(record.id)),
        nameOf(record.tenant), compact(record.prompt_tokens), this.found(record), this.sources(record), record.stopped ? compact(computed(record)) : "–", reason(record),
        seconds(record.ttft_s), seconds(record.total_s), compact(record.output_tokens), record.finish_reason ?? record.state,
      ],
    })));
    if (this.opened && this.dialog.open) {
      const record = this.records.get(this.opened);
      if (record && this.print !== JSON.stringify(record)) { this.fill(record); this.phases(this.opened); }
    }
  }

  found(record) {
    if (!record.stopped) return "–"; // not looked up yet
    const part = (tokens) => `${(100 * tokens) / Math.max(1, record.prompt_tokens)}%`;
    const strip = (record.hits ?? []).map((hit, i) => h("i", { style: { width: part(hit.tokens), background: `var(--${tierHue(hit.tier, i)})` } }));
    const share = record.prompt_tokens ? (record.cached_tokens ?? 0) / record.prompt_tokens : 0;
    return [percent(share), h("span", { class: "cached", "aria-hidden": "true" }, strip)];
  }

  sources(record) {
    return (record.hits ?? []).map((hit) => tierWord(hit.tier)).join(", ") || "–";
  }

  open(id) {
    this.opened = id;
    this.falls = null;
    this.fill(this.records.get(id));
    this.dialog.showModal();
    this.phases(id);
  }

  /** Fetch the phases of a request. A record that the server has dropped since has none. */
  async phases(id) {
    const { waterfall } = await ask(`kvloom/requests/${encodeURIComponent(id)}`).catch(() => ({}));
    if (this.opened !== id || !waterfall?.length) return;
    this.falls = waterfall;
    byId("waterfall")?.replaceChildren(...drawn(waterfall));
  }

  fill(record) {
    this.print = JSON.stringify(record);
    const hits = record.hits ?? [];
    const found = hits.map((hit, i) => ({ ...hit, hue: tierHue(hit.tier, i) })).filter((hit) => hit.tokens > 0);
    const part = (tokens) => `${(100 * tokens) / Math.max(1, record.prompt_tokens)}%`;
    const facts = [
      ["tenant", nameOf(record.tenant)], ["state", record.state], ["waited", seconds(record.queue_s)], ["first token after", seconds(record.ttft_s)],
      ["total time", seconds(record.total_s)], ["output tokens", count(record.output_tokens)], ["preempted", plural(record.preemptions ?? 0, "time")],
      ["finish reason", record.finish_reason ?? "not yet"],
    ];
    if (record.draft_tokens) facts.push(["draft tokens", `${count(record.draft_tokens)}, ${percent(record.accepted_tokens / record.draft_tokens)} accepted`]);
    const closes = h("button", { type: "button", autofocus: true, onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(
      h("h2", { id: "explanation-title" }, "Request ", h("span", { class: "mono" }, record.id)),
      h("p", { class: "quiet" }, arrived(record.arrived)),
      h("p", { class: "why" }, sentence(record)),
      h("div", { class: "strip", role: "img", "aria-label": "The prompt: cached and computed tokens" },
        found.map((hit) => h("i", { style: { width: part(hit.tokens), background: `var(--${hit.hue})` } }))),
      marks([...found.map((hit) => [hit.hue, hit.tier === "device" ? `${count(hit.tokens)} in the pool` : `${count(hit.tokens)} loaded from ${hit.tier}`]),
        ["free", `${count(computed(record))} computed`]]),
      h("div", { id: "waterfall" }, ...(this.falls ? drawn(this.falls) : [])),
      h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      closes,
    );
    if (this.dialog.open) closes.focus();
  }
}

const computed = (record) => record.computed_tokens ?? record.prompt_tokens - (record.cached_tokens ?? 0);

/** The server's word for why a lookup ended, and where. */
function reason({ stopped }) {
  if (!stopped?.reason) return "–";
  return [stopped.reason.replaceAll("_", " "), h("small", { class: "quiet" }, ` at ${compact(stopped.at_token)}`)];
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

const PHASES = { queue: "grey", prefill: "red", decode: "blue" };

/** The phases of a request as a table with a bar in each row, on a common time axis. */
function drawn(phases) {
  const end = Math.max(1e-9, ...phases.map((phase) => phase.end_s)), several = phases.some((phase) => phase.prompt > 0);
  const chunks = new Map(), tiers = [...new Set(phases.map((phase) => phase.tier).filter(Boolean))];
  const rows = phases.map((phase) => {
    const n = phase.phase === "prefill" ? (chunks.get(phase.prompt) ?? 0) + 1 : 0;
    if (n) chunks.set(phase.prompt, n);
    const chunked = n && phases.filter((one) => one.phase === "prefill" && one.prompt === phase.prompt).length > 1;
    const words = phase.phase === "load" ? `load from ${phase.tier}` : chunked ? `prefill, chunk ${n}` : phase.phase;
    const hue = phase.phase === "load" ? tierHue(phase.tier, tiers.indexOf(phase.tier)) : PHASES[phase.phase];
    const took = phase.end_s - phase.start_s, left = Math.min(99, (100 * phase.start_s) / end);
    const bar = h("span", { class: "phase", "aria-hidden": "true" }, h("i", { style: { "margin-left": `${left}%`, width: `${Math.max(0.6, Math.min(100 - left, (100 * took) / end))}%`, background: `var(--${hue})` } }));
    return h("tr", {}, h("th", { scope: "row" }, several ? `prompt ${phase.prompt + 1}: ${words}` : words), h("td", { class: "n" }, seconds(phase.start_s)),
      h("td", { class: "n" }, seconds(took)), h("td", { class: "n" }, phase.tokens === null ? "" : count(phase.tokens)), h("td", { class: "bar" }, bar));
  });
  const head = ["phase", "start", "time", "tokens"].map((title, i) => h("th", { scope: "col", class: i ? "n" : null }, title));
  return [h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases of the request" }, h("table", {}, h("caption", { class: "unseen" }, "Phases of the request"),
    h("thead", {}, h("tr", {}, head, h("td", {}))), h("tbody", {}, rows)))];
}
