// Tiers from the device pool down, transfers between them, and miss reasons.

import { byId, bytes, count, h, percent, plural, s, tenantColour, tenantName } from "./dom.js";

const WHY = {
  complete: "complete", "never seen": "never seen", evicted: "evicted", "other tenant": "other tenant's", "snapshot missing": "snapshot missing",
  "window page missing": "window page evicted", "media missing": "image evicted", "reading off": "reading off",
};

export class Tiers {
  draw(state) {
    const { engine } = state;
    const rates = this.rates(engine.tiers, state.engine_at ?? state.now);
    const boxes = [this.device(engine)];
    for (const [i, tier] of engine.tiers.entries()) boxes.push(this.flow(rates[i]), this.tier(tier));
    if (!engine.tiers.length) {
      boxes.push(h("p", { class: "quiet", style: { "margin-top": "10px" } }, "No tiers: evicted pages are recomputed."));
    }
    byId("tiers-body").replaceChildren(...boxes);
    this.tenants(engine);
    const reasons = Object.entries(engine.pool.miss_reasons).sort((a, b) => b[1] - a[1]);
    const most = Math.max(1, ...reasons.map(([, n]) => n));
    byId("miss-reasons").replaceChildren(...reasons.map(([why, n]) => h("li", {}, h("span", {}, WHY[why] ?? why),
      h("span", { class: "track" }, h("i", { style: { width: `${(100 * n) / most}%` } })), h("b", {}, count(n)))));
    if (!reasons.length) byId("miss-reasons").replaceChildren(h("li", {}, h("span", { class: "quiet" }, "no lookups yet")));
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
    return h("div", { class: "tier" }, h("header", {}, h("strong", {}, "device pool"), h("span", {}, `${bytes(occupied)} of ${bytes(total)}`)),
      h("div", { class: "meter" }, part("pinned", "yellow"), part("in use", "red"), part("cached", "sky")),
      h("p", {}, `${percent(by["in use"] / pages)} of its pages in use, the rest cached · ${plural(pool.evictions, "eviction")}, ${bytes(pool.evicted_bytes)}`));
  }

  tier(tier) {
    const odd = Object.entries(tier.reads).filter(([outcome, n]) => n && outcome !== "ok" && outcome !== "missing");
    const full = tier.capacity ? Math.min(100, (100 * tier.bytes) / tier.capacity) : 0;
    const back = tier.loaded_tokens === undefined
      ? `read ${count(tier.reads.ok ?? 0)}, missed ${count(tier.reads.missing ?? 0)}` : `${plural(tier.loaded_tokens, "token")} loaded`;
    return h("div", { class: "tier" }, h("header", {}, h("strong", {}, tier.name), h("span", {}, `${bytes(tier.bytes)}${tier.capacity ? ` of ${bytes(tier.capacity)}` : ""}`)),
      h("div", { class: "meter" }, h("i", { style: { width: `${full}%`, background: "var(--green)" } })),
      h("p", {}, `${plural(tier.objects, "page")} · ${back}${tier.evicted ? `, ${count(tier.evicted)} evicted` : ""}${tier.breaker === "closed" ? "" : " · disabled after faults"}`
        + odd.map(([outcome, n]) => ` · ${count(n)} ${outcome}`).join("")));
  }

  tenants({ tenants, pool }) {
    const several = tenants.length > 1;
    byId("tenants").hidden = byId("tenants-title").hidden = !several;
    if (!several) return;
    const total = pool.slabs * pool.slab_bytes;
    const used = tenants.map((tenant, place) => ({ ...tenant, place })).filter((tenant) => tenant.used || tenant.quota).sort((a, b) => b.used - a.used);
    byId("tenants").replaceChildren(...used.slice(0, 8).map((tenant) => h("li", {}, h("span", {}, tenantName(tenants, tenant.place)),
      h("span", { class: "track" }, h("i", { style: { width: `${(100 * tenant.used) / (tenant.quota ?? total)}%`, background: `var(--${tenantColour(tenant.place)})` } })),
      h("b", {}, tenant.quota ? percent(tenant.used / tenant.quota) : bytes(tenant.used)))));
  }

  flow({ down, up }) {
    const arrow = (way, rate, words) => h("span", { class: `${way}${rate > 0 ? " on" : ""}` },
      s("svg", { viewBox: "0 0 14 30", "aria-hidden": "true" }, s("line", { x1: 7, x2: 7, y1: 2, y2: 28 })), `${words} ${bytes(rate)}/s`);
    return h("div", { class: "flow" }, arrow("down", down, "↓"), arrow("up", up, "↑"));
  }
}
