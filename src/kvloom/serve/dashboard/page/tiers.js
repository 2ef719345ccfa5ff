// Tiers from the device pool down, transfers between them, hit rate by tier, and miss reasons.

import { byId, bytes, compact, count, h, marks, percent, plural, s, tierHue, tierWord } from "./dom.js";

export class Tiers {
  draw(state) {
    const { engine } = state;
    const rates = this.past(state) ?? this.rates(engine.tiers, state.engine_at ?? state.now);
    const boxes = [this.device(engine)];
    for (const [i, tier] of engine.tiers.entries()) boxes.push(this.flow(rates[i]), this.tier(tier, i, state.words.outcomes));
    if (!engine.tiers.length) {
      boxes.push(h("p", { class: "quiet", style: { "margin-top": "10px" } }, "No tiers: evicted pages are recomputed."));
    }
    byId("tiers-body").replaceChildren(...boxes);
    this.sources(state.totals, engine.tiers);
    const reasons = Object.entries(engine.pool.miss_reasons).sort((a, b) => b[1] - a[1]);
    const all = Math.max(1, reasons.reduce((sum, [, n]) => sum + n, 0)), most = Math.max(1, ...reasons.map(([, n]) => n));
    byId("miss-reasons").replaceChildren(...reasons.map(([why, n]) => h("li", { title: state.words.miss_reasons[why] }, h("span", {}, why),
      h("span", { class: "track" }, h("i", { style: { width: `${(100 * n) / most}%` } })), h("b", {}, compact(n)), h("b", {}, percent(n / all)))));
    if (!reasons.length) byId("miss-reasons").replaceChildren(h("li", {}, h("span", { class: "quiet" }, "no lookups yet")));
  }

  /** Bytes per second by tier in a state of the past. The rates of the present then start anew. */
  past({ tier_rates: rates, engine }) {
    if (rates === undefined) return null;
    this.before = this.last = undefined;
    return rates.length === engine.tiers.length ? rates : engine.tiers.map(() => ({ down: 0, up: 0 }));
  }

  /** Bytes per second by tier, smoothed over the last snapshots. */
  rates(tiers, at) {
    const before = this.before;
    const same = before && before.tiers.length === tiers.length && at > before.at;
    if (!before || at > before.at) this.before = { at, tiers };
    if (!same) return this.last?.length === tiers.length ? this.last : tiers.map(() => ({ down: 0, up: 0 }));
    const rate = (name, i) => Math.max(0, (tiers[i][name] - before.tiers[i][name]) / (at - before.at));
    const smooth = (old, fresh) => (old === undefined ? fresh : old * 0.7 + fresh * 0.3);
    const still = (x) => (x < 512 ? 0 : x);
    this.last = tiers.map((_, i) => ({
      down: still(smooth(this.last?.[i]?.down, rate("bytes_written", i))), up: still(smooth(this.last?.[i]?.up, rate("bytes_read", i))),
    }));
    return this.last;
  }

  device({ pool, map }) {
    const total = pool.slabs * pool.slab_bytes, occupied = (pool.slabs - pool.free_slabs) * pool.slab_bytes;
    const by = { "in use": 0, cached: 0, pinned: 0 };
    for (const row of map.legend) if (row.state in by) by[row.state] += row.pages;
    const pages = Math.max(1, by["in use"] + by.cached + by.pinned);
    const part = (name, hue) => h("i", { style: { width: `${(100 * (occupied / total) * by[name]) / pages}%`, background: `var(--${hue})` } });
    const size = (name) => bytes((occupied * by[name]) / pages);
    return h("div", { class: "tier" }, h("header", {}, h("strong", {}, "pool"), h("span", {}, `${bytes(occupied)} of ${bytes(total)}`)),
      h("div", { class: "meter" }, part("pinned", "yellow"), part("in use", "red"), part("cached", "sky")),
      marks([...(by.pinned ? [["yellow", `pinned ${size("pinned")}`]] : []), ["red", `in use ${size("in use")}`], ["sky", `cached ${size("cached")}`], ["free", `free ${bytes(total - occupied)}`]]),
      h("p", {}, `${plural(pool.evictions, "eviction")}, ${bytes(pool.evicted_bytes)}`));
  }

  tier(tier, i, outcomes) {
    const faults = Object.entries(tier.faults).sort((a, b) => b[1] - a[1]);
    const full = tier.capacity ? Math.min(100, (100 * tier.bytes) / tier.capacity) : 0;
    const back = tier.loaded_tokens === undefined
      ? `read ${count(tier.reads.ok ?? 0)}, missed ${count(tier.reads.missing ?? 0)}` : `${plural(tier.loaded_tokens, "token")} loaded`;
    return h("div", { class: "tier" }, h("header", {}, h("strong", {}, tier.name), h("span", {}, `${bytes(tier.bytes)}${tier.capacity ? ` of ${bytes(tier.capacity)}` : ""}`)),
      h("div", { class: "meter" }, h("i", { style: { width: `${full}%`, background: `var(--${tierHue(tier.name, i)})` } })),
      h("p", {}, `${plural(tier.objects, "page")} · ${back}${tier.evicted ? `, ${count(tier.evicted)} evicted` : ""}`,
        faults.map(([outcome, n]) => h("span", { class: "fault", title: outcomes[outcome] }, ` · ${count(n)} ${outcome}`)),
        tier.breaker === "closed" ? null : h("span", { class: "fault" }, " · disabled after faults")));
  }

  /** Where prompt tokens came from since the server started: the parts add up to 100 %. */
  sources({ prompt_tokens: all, cached_tokens: cached, hit_tokens: hits }, tiers) {
    const names = [...new Set(["device", ...tiers.map((tier) => tier.name), ...Object.keys(hits)])];
    const parts = names.map((name, i) => [tierWord(name), tierHue(name, i - 1), hits[name] ?? 0]);
    parts.push(["computed", "grey", all - cached]);
    const share = (n) => (all ? n / all : 0);
    byId("sources-about").textContent = all ? `${compact(all)} prompt tokens since the start` : "no finished requests yet";
    byId("sources-strip").replaceChildren(...parts.map(([, hue, n]) => h("i", { style: { width: `${100 * share(n)}%`, background: `var(--${hue})` } })));
    byId("sources").replaceChildren(...parts.map(([name, hue, n]) => h("li", {}, h("span", {}, h("i", { class: "swatch", style: { background: `var(--${hue})` } }), name),
      h("b", {}, `${compact(n)} tokens`), h("b", {}, percent(share(n), 1)))));
  }

  flow({ down, up }) {
    const arrow = (way, rate, words) => h("span", { class: `${way}${rate > 0 ? " on" : ""}` },
      s("svg", { viewBox: "0 0 14 30", "aria-hidden": "true" }, s("line", { x1: 7, x2: 7, y1: 2, y2: 28 })), `${words} ${bytes(rate)}/s`);
    return h("div", { class: "flow" }, arrow("down", down, "↓ offload"), arrow("up", up, "↑ load"));
  }
}
