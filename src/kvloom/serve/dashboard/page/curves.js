// The past ten minutes: six cards with a figure and a curve. Pointer and arrow keys read values.
// SERVER and FLEET are the cards of the two pages, and the columns of the same past as a table.

import { byId, compact, h, marks, percent, s, seconds, table, tip, noTip } from "./dom.js";

const WIDTH = 320, HEIGHT = 92, TOP = 8, BOTTOM = 76;
const FEWEST = 60, MOST = 300; // samples across

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const last = (values, n) => values.slice(-n).filter((v) => v !== null);

/** Share of prompt tokens found in the `n` samples before `end`. */
function hitRate(series, n, end = series.prompt_rate.length) {
  const asked = series.prompt_rate.slice(Math.max(0, end - n), end), hits = series.hit_rate.slice(Math.max(0, end - n), end);
  const total = asked.reduce((a, b) => a + b, 0);
  return total ? asked.reduce((sum, x, i) => sum + x * (hits[i] ?? 0), 0) / total : null;
}

/** The latest value that was measured; since the start if none was in ten minutes. */
const latest = (values, total) => values.findLast((v) => v !== null) ?? total ?? null;

function latency(id, title, hue, of = "") {
  const at = (x, totals, q) => seconds(latest(x[`${id}_${q}`], totals.latency[id]?.[q]));
  return { id, title, lines: [[`${id}_p50`, hue, "p50"], [`${id}_p95`, "red", "p95"]], beside: [[`${id}_p99`, "", "p99"]], show: seconds,
    figure: (x, totals) => at(x, totals, "p50"), unit: (x, totals) => `p50${of} · p95 ${at(x, totals, "p95")} · p99 ${at(x, totals, "p99")}` };
}

const hit = { id: "hit", title: "Hit rate", top: 1, lines: [["hit_rate", "green", "of prompt tokens"]], show: (x) => percent(x),
  figure: (x, totals, raw) => percent(hitRate(raw, 30) ?? (totals.prompt_tokens ? totals.cached_tokens / totals.prompt_tokens : null)),
  unit: (x, totals) => `of prompt tokens${totals.prompt_tokens ? ` · ${percent(totals.cached_tokens / totals.prompt_tokens)} since the start` : ""}` };
const load = { id: "load", title: "Requests", lines: [["running", "pink", "running"], ["waiting", "red", "waiting"]], show: compact,
  figure: (x) => compact(x.running.at(-1)), unit: (x) => `running · ${compact(x.waiting.at(-1))} waiting` };
const perSecond = (x) => (x === null || x === undefined ? "–" : `${x < 10 ? x.toFixed(1) : compact(x)}/s`);

export const SERVER = {
  cards: [
    hit,
    { id: "saved", title: "Saved by the cache", lines: [["saved_rate", "sky", "tokens not computed"]], show: (x) => `${compact(x)}/s`,
      figure: (x, totals) => compact(totals.cached_tokens), unit: (x, totals) => `tokens · about ${seconds(totals.saved_seconds)} of prefill` },
    { id: "rate", title: "Throughput", lines: [["output_rate", "blue", "output"]], beside: [["prompt_rate", "", "prompt"]], show: (x) => `${compact(x)}/s`,
      figure: (x) => compact(mean(last(x.output_rate, 5))), unit: (x) => `output tokens/s · ${compact(mean(last(x.prompt_rate, 5)))} prompt` },
    latency("ttft", "Time to first token", "orange"),
    latency("itl", "Time between tokens", "yellow"),
    load,
    { id: "accept", title: "Accepted draft tokens", level: "h3", top: 1, lines: [["accept_rate", "green", "accepted"]], beside: [["draft_tokens", "", "tokens per draft and step"]],
      show: (x, name) => (name === "draft_tokens" ? x?.toFixed(2) ?? "–" : percent(x)), figure: (x) => percent(mean(last(x.accept_rate, 30))), unit: () => "in the last minute" },
  ],
  past: [["hit rate", "hit_rate", percent], ["first token p50", "ttft_p50", seconds], ["p95", "ttft_p95", seconds], ["between tokens p50", "itl_p50", seconds],
    ["p95", "itl_p95", seconds], ["output/s", "output_rate", compact], ["prompt/s", "prompt_rate", compact], ["running", "running", compact], ["waiting", "waiting", compact],
    ["pool used", "used", percent], ["drafts accepted", "accept_rate", percent]],
};
export const FLEET = {
  cards: [
    hit,
    { id: "rate", title: "Requests answered", lines: [["request_rate", "blue", "requests"]], beside: [["prompt_rate", "", "prompt tokens"]], show: perSecond,
      figure: (x) => perSecond(mean(last(x.request_rate, 5))), unit: (x, totals) => `${compact(totals.requests)} since the start · ${compact(mean(last(x.prompt_rate, 5)))} prompt tokens/s` },
    load,
    latency("ttft", "Time to first token", "orange", " of streams"),
    latency("overhead", "Spent in the router", "yellow"),
    { id: "handed", title: "Hand-overs", lines: [["hand_over_rate", "green", "prompts"]], show: perSecond,
      figure: (x) => perSecond(mean(last(x.hand_over_rate, 5))), unit: (x, totals) => `prefill → decode · ${compact(totals.hand_overs)} since the start` },
  ],
  past: [["hit rate", "hit_rate", percent], ["requests", "request_rate", perSecond], ["prompt tokens/s", "prompt_rate", compact], ["first token p50", "ttft_p50", seconds], ["p95", "ttft_p95", seconds],
    ["in the router p50", "overhead_p50", seconds], ["p95", "overhead_p95", seconds], ["hand-overs", "hand_over_rate", perSecond], ["running", "running", compact], ["waiting", "waiting", compact]],
};

export class Curves {
  constructor({ cards, past }) {
    this.past = past;
    this.cards = cards.map((card) => {
      const node = byId(`curve-${card.id}`);
      const figure = h("strong", {}, "–"), unit = h("span");
      const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 });
      node.append(h(card.level ?? "h2", {}, card.title), h("p", { class: "figure" }, figure, unit), svg);
      svg.addEventListener("pointermove", (event) => this.read(card, svg, event.offsetX / svg.clientWidth, event.clientX, event.clientY));
      svg.addEventListener("pointerleave", () => this.leave(svg));
      svg.addEventListener("blur", () => this.leave(svg));
      svg.addEventListener("keydown", (event) => this.key(card, svg, event));
      return { card, figure, unit, svg, at: null };
    });
  }

  /** `then` is the Unix time at which the curves end; null: now. */
  draw(raw, totals, then = null) {
    this.then = then === null ? null : new Date(then * 1000).toLocaleTimeString();
    const series = { ...raw.series, hit_rate: raw.series.hit_rate.map((_, i) => hitRate(raw.series, 5, i + 1)),
      saved_rate: raw.series.prompt_rate.map((rate, i) => rate * (raw.series.hit_rate[i] ?? 0)) };
    const history = (this.history = { ...raw, series });
    this.across = Math.min(MOST, Math.max(FEWEST, series.running.length));
    if (!series.running.length) return;
    for (const one of this.cards) {
      const { card, svg } = one;
      one.figure.textContent = card.figure(series, totals, raw.series);
      one.unit.textContent = card.unit(series, totals);
      if (!one.legend && card.lines.length > 1) {
        one.legend = marks(card.lines.map(([, hue, label]) => [hue, label]));
        svg.before(one.legend);
      }
      const most = card.top ?? niceTop(Math.max(0, ...card.lines.flatMap(([name]) => series[name].filter((v) => v !== null))));
      const parts = [
        s("line", { class: "grid", x1: 0, x2: WIDTH, y1: TOP, y2: TOP }), s("line", { class: "grid", x1: 0, x2: WIDTH, y1: BOTTOM, y2: BOTTOM }),
      ];
      for (const [place, [name, hue]] of card.lines.entries()) parts.push(...curve(series[name], this.across, most, hue, place === 0));
      svg.replaceChildren(...parts, one.cursor ?? "");
      svg.dataset.most = most;
      svg.setAttribute("aria-label", `${card.title}: ${one.figure.textContent} ${one.unit.textContent}. Arrow keys read the curve; it goes up to ${card.show(most)}.`);
      labels(one, card.show(most), history.seconds * this.across, this.then);
    }
    const rows = [];
    for (let i = series.running.length - 1; i >= 0 && rows.length < 60; i -= Math.max(1, Math.round(10 / history.seconds))) {
      const key = Math.round(history.until - (series.running.length - 1 - i) * history.seconds);
      rows.push({ key, print: String(key), cells: () => [
        new Date(key * 1000).toLocaleTimeString(), ...this.past.map(([, name, show]) => show(series[name][i])),
      ] });
    }
    if (byId("past").open) {
      table(byId("past-table"), "The past ten minutes", [["time"], ...this.past.map(([title]) => [title, 1])], rows);
    }
  }

  read(card, svg, share, x, y) {
    const { series, seconds: step } = this.history ?? {};
    if (!series?.running.length) return;
    const n = series.running.length, first = this.across - n;
    const at = Math.min(n - 1, Math.max(0, Math.round(share * (this.across - 1)) - first));
    const one = this.cards.find((c) => c.svg === svg);
    one.at = at;
    const place = ((first + at) / (this.across - 1)) * WIDTH;
    one.cursor?.remove();
    one.cursor = s("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: BOTTOM });
    svg.append(one.cursor);
    const then = (n - 1 - at) * step;
    const values = [...card.lines, ...(card.beside ?? [])].map(([name, , label]) => `${card.show(series[name][at], name)} ${label}`);
    const text = `${values.join("\n")}\n${then ? `${seconds(then)} ${this.then ? `before ${this.then}` : "ago"}` : this.then ?? "now"}`;
    tip(text, x, y);
    byId("said").textContent = document.activeElement === svg ? text.replaceAll("\n", ", ") : byId("said").textContent;
  }

  key(card, svg, event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") this.leave(svg);
    if (steps === undefined || !this.history?.series.running.length) return;
    event.preventDefault();
    const n = this.history.series.running.length, one = this.cards.find((c) => c.svg === svg);
    const at = Math.min(n - 1, Math.max(0, (one.at ?? n) + steps));
    const box = svg.getBoundingClientRect(), share = (this.across - n + at) / (this.across - 1);
    this.read(card, svg, share, box.left + share * box.width, box.top + 20);
  }

  leave(svg) {
    const one = this.cards.find((c) => c.svg === svg);
    one.cursor?.remove();
    one.cursor = one.at = null;
    noTip();
  }
}

/** Values as a path that ends now; null values interrupt it. */
function curve(values, across, most, hue, area) {
  const first = across - values.length;
  const x = (i) => (((first + i) / (across - 1)) * WIDTH).toFixed(1);
  const y = (v) => (BOTTOM - (BOTTOM - TOP) * Math.min(1, v / (most || 1))).toFixed(1);
  const runs = [];
  let run = [];
  for (const [i, v] of values.entries()) {
    if (v === null) { if (run.length) runs.push(run); run = []; } else run.push([i, v]);
  }
  if (run.length) runs.push(run);
  const line = runs.map((r) => r.length === 1
    ? `M${x(r[0][0])} ${y(r[0][1])}h1.5` : r.map(([i, v], k) => `${k ? "L" : "M"}${x(i)} ${y(v)}`).join("")).join("");
  const shade = runs.filter((r) => r.length > 1).map((r) => `M${x(r[0][0])} ${BOTTOM}${r.map(([i, v]) => `L${x(i)} ${y(v)}`).join("")}L${x(r.at(-1)[0])} ${BOTTOM}Z`).join("");
  const parts = [];
  if (area) parts.push(s("path", { d: shade, style: { fill: `var(--${hue})`, "fill-opacity": "0.16" } }));
  parts.push(s("path", { d: line, fill: "none", "vector-effect": "non-scaling-stroke", "stroke-width": area ? 2 : 1.5, "stroke-linejoin": "round",
    "stroke-linecap": "round", "stroke-dasharray": area ? null : "1 3.5", style: { stroke: `var(--${hue})` } }));
  return parts;
}

function labels(one, top, span, then) {
  one.foot ??= one.svg.parentNode.appendChild(h("p", { class: "feet quiet", "aria-hidden": "true" }, h("span"), h("span"), h("span")));
  const [left, middle, right] = one.foot.children;
  left.textContent = `${Math.round(span / 60)} min ${then ? "before" : "ago"}`;
  middle.textContent = `top ${top}`;
  right.textContent = then ?? "now";
}

/** The next of 1, 2, 5, 10 … at or above a value, for a stable scale. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10, 20].find((k) => k * power >= value * 1.05) * power;
}
