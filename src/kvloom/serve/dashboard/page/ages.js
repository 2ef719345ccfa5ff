// Is the pool large enough? The idle time of pages when they are hit, against that of pages when they are evicted.

import { byId, compact, h, marks, percent, s, seconds } from "./dom.js";

const WIDTH = 370, HEIGHT = 150, BASE = 128, TOP = 8, MOST_LABELS = 7;

export class Ages {
  draw({ totals }) {
    const { bounds, evicted, reused, evicted_p50: out, reused_p50: back } = totals.ages;
    const sums = [reused, evicted].map((counts) => counts.reduce((sum, n) => sum + n, 0));
    byId("ages-about").textContent = verdict(sums, back, out);
    if (!sums[0] && !sums[1]) { byId("ages-body").replaceChildren(); return; }
    const used = reused.map((n, i) => (n + evicted[i] ? i : null)).filter((i) => i !== null);
    const first = Math.max(0, Math.min(...used) - 1), last = Math.min(bounds.length, Math.max(...used) + 1);
    const shares = [reused, evicted].map((counts, k) => counts.map((n) => (sums[k] ? n / sums[k] : 0)));
    const most = Math.max(...shares.flat()), step = WIDTH / (last - first + 1), bar = Math.min(22, step * 0.36);
    const every = Math.ceil((last - first + 1) / MOST_LABELS);
    const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": byId("ages-about").textContent },
      s("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }));
    for (let i = first; i <= last; i++) {
      const middle = (i - first + 0.5) * step;
      for (const [k, hue] of [[0, "green"], [1, "red"]]) {
        const share = shares[k][i], high = Math.max(1.5, ((BASE - TOP) * share) / most);
        if (share) svg.append(s("rect", { x: middle + (k ? 1 : -bar - 1), y: BASE - high, width: bar, height: high, rx: 2, style: { fill: `var(--${hue})` } },
          s("title", {}, `${percent(share, 1)} of ${k ? "evicted" : "hit"} entries were idle for ${range(bounds, i)}`)));
      }
      if ((i - first) % every === 0) svg.append(s("text", { x: middle, y: HEIGHT - 6, "text-anchor": "middle" }, i < bounds.length ? brief(bounds[i]) : "more"));
    }
    byId("ages-body").replaceChildren(svg, h("p", { class: "quiet" }, "Share of entries by idle time. A label is the longest idle time of its bars."), marks([
      ["green", `hit again: ${compact(sums[0])} entries${back === null ? "" : `, median after ${seconds(back)}`}`],
      ["red", `evicted: ${compact(sums[1])} entries${out === null ? "" : `, median after ${seconds(out)}`}`]]));
  }
}

/** The idle times of both, in one sentence. */
function verdict([hits, evictions], back, out) {
  if (!hits && !evictions) return "No entry was hit or evicted yet.";
  if (!evictions) return "Nothing was evicted yet: the pool is large enough for its traffic.";
  if (!hits) return "Entries are evicted, and none was hit before: prompts share no prefix, or the pool is too small.";
  return out < back ? "Entries are evicted sooner than hit entries come back: a larger pool or a tier would hit more."
    : "Evicted entries were idle for longer than hit entries: the pool keeps what comes back.";
}

const brief = (x) => (x < 60 ? `${x} s` : x < 3600 ? `${x / 60} min` : x < 86400 ? `${x / 3600} h` : `${x / 86400} d`);
const range = (bounds, i) => (i === 0 ? `at most ${brief(bounds[0])}` : i < bounds.length ? `${brief(bounds[i - 1])} to ${brief(bounds[i])}` : `more than ${brief(bounds.at(-1))}`);
