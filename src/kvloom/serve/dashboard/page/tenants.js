// Tenants: bytes in the pool, quota, tokens and hit rate. Hidden while there is only one without a name.

import { byId, bytes, compact, nameOf, percent, swatch, table, tenantColour } from "./dom.js";

const MOST = 12;
const COLUMNS = [["tenant"], ["in the pool", 1], ["of the pool", 1, "middle"], ["quota", 1, "middle"], ["requests", 1, "wide"], ["prompt tokens", 1, "middle"], ["hit rate", 1]];

export class Tenants {
  draw({ engine, totals }) {
    const total = engine.pool.slabs * engine.pool.slab_bytes;
    const places = new Map(engine.tenants.map((tenant, place) => [tenant.name, place]));
    const names = [...new Set([...places.keys(), ...Object.keys(totals.tenants)])];
    const rows = names.map((name) => ({ name, place: places.get(name) ?? null, ...engine.tenants[places.get(name)], ...totals.tenants[name] }))
      .filter((row) => row.used || row.quota || row.requests).sort((a, b) => (b.used ?? 0) - (a.used ?? 0));
    byId("tenants").hidden = !rows.some((row) => row.name);
    if (byId("tenants").hidden) return;
    const shared = rows.some((row) => row.name && row.declared === false);
    byId("tenants-about").textContent = `${shared ? "Tenants without an API key share one account: they have no quota and no share of the pool. " : ""}`
      + `${rows.length > MOST ? `The ${MOST} largest of ${rows.length}. ` : ""}Tokens count from the start of the server.`;
    table(byId("tenants-table"), "Tenants", COLUMNS, rows.slice(0, MOST).map((row) => ({
      key: row.name || "(unnamed)", print: `${row.used} ${row.requests} ${row.prompt_tokens}`,
      cells: () => [
        [swatch(tenantColour(row.place)), nameOf(row.name)], bytes(row.used ?? 0), percent((row.used ?? 0) / total),
        row.quota ? `${percent(row.used / row.quota)} of ${bytes(row.quota)}` : "–", compact(row.requests ?? 0), compact(row.prompt_tokens ?? 0),
        row.prompt_tokens ? percent(row.cached_tokens / row.prompt_tokens) : "–",
      ],
    })));
  }
}
