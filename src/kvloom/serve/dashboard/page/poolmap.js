// The page pool as a map: a tile is a slab, or a run of slabs if there are more than fit. Its pages are stacked in it.

import { byId, bytes, calm, colour, count, groupColours, h, noTip, percent, plural, STATES, table, tenantColour, tenantName, tip } from "./dom.js";

const RANK = { pinned: 0, "in use": 1, cached: 2, unknown: 3, unbacked: 4 };
const GLOW_MS = 900, TALLEST = 64;

export class PoolMap {
  constructor() {
    this.canvas = byId("map");
    this.brush = this.canvas.getContext("2d");
    this.mode = "kind";
    this.only = null; // the selected legend entry
    this.marked = null; // cells of the selected branch
    this.prints = [];
    this.glow = new Map();
    this.at = null;
    for (const input of document.querySelectorAll('input[name="mode"]')) {
      input.addEventListener("change", () => { this.mode = input.value; this.only = null; this.legend(); this.paint(); });
    }
    this.canvas.addEventListener("pointermove", (event) => this.point(this.tileAt(event), event.clientX, event.clientY));
    this.canvas.addEventListener("pointerleave", () => { this.at = null; noTip(); this.paint(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.at = null; noTip(); this.paint(); });
    new ResizeObserver(([{ contentRect }]) => { this.width = contentRect.width; this.paint(); }).observe(this.canvas.parentNode);
  }

  draw(engine) {
    this.engine = engine;
    const { map } = engine;
    const hues = groupColours(engine.groups);
    this.kinds = map.legend.map((row) => {
      const group = row.group === null ? null : engine.groups[row.group];
      return {
        ...row, rank: RANK[row.state],
        names: { kind: group ? group.name : row.state, state: row.state, tenant: row.state === "unbacked" ? "unbacked" : tenantName(engine.tenants, row.tenant) },
        hues: { kind: group ? hues[row.group] : STATES[row.state], state: STATES[row.state], tenant: row.state === "unbacked" ? "line" : tenantColour(row.tenant) },
        per: group ? group.pages_per_slab : 1,
        bytes: row.state === "unbacked" ? 0 : row.pages * (group ? engine.pool.slab_bytes / group.pages_per_slab : engine.pool.slab_bytes),
      };
    });
    const tiles = Array.from({ length: map.cells }, () => []);
    for (let i = 0; i < map.at.length; i++) tiles[map.at[i]].push([map.what[i], map.share[i]]);
    for (const tile of tiles) if (tile.length > 1) tile.sort((a, b) => this.kinds[a[0]].rank - this.kinds[b[0]].rank);
    const now = performance.now();
    const prints = tiles.map((tile) => tile.map(([what, share]) => `${map.legend[what].group}${map.legend[what].state}${share}`).join());
    if (this.prints.length === prints.length && !calm()) {
      for (const [i, print] of prints.entries()) if (print !== this.prints[i]) this.glow.set(i, now);
    }
    this.prints = prints;
    this.tiles = tiles;
    this.about();
    this.legend();
    this.paint();
    if (byId("map-table").closest("details").open) this.tabled();
  }

  about() {
    const { pool } = this.engine;
    const occupied = pool.slabs - pool.free_slabs;
    const idle = this.engine.groups.length ? pool.free_pages_in_occupied_slabs : 0;
    byId("pool-about").textContent = `${bytes(occupied * pool.slab_bytes)} of ${bytes(pool.slabs * pool.slab_bytes)} occupied in ${plural(pool.slabs, "slab")} · `
      + `${plural(pool.in_use_pages, "page")} in use, ${count(pool.cached_pages)} cached${idle ? `, ${count(idle)} free in occupied slabs` : ""}`;
  }

  legend() {
    if (!this.kinds) return;
    const { pool } = this.engine;
    const rows = new Map();
    for (const kind of this.kinds) {
      const name = kind.names[this.mode];
      const row = rows.get(name) ?? { name, hue: kind.hues[this.mode], pages: 0, bytes: 0 };
      row.pages += kind.pages;
      row.bytes += kind.bytes;
      rows.set(name, row);
    }
    const total = pool.slabs * pool.slab_bytes;
    const used = [...rows.values()].reduce((sum, row) => sum + row.bytes, 0);
    const items = [...rows.values()].sort((a, b) => b.bytes - a.bytes);
    items.push({ name: "free", hue: "free", bytes: Math.max(0, total - used) });
    this.shades();
    const list = byId("legend");
    const focused = document.activeElement?.closest("#legend button")?.dataset.name;
    list.replaceChildren(...items.map((row) => h("li", {}, h("button", {
      type: "button", "data-name": row.name, "aria-pressed": String(this.only === row.name), disabled: row.name === "free",
      onclick: () => { this.only = this.only === row.name ? null : row.name; this.legend(); this.paint(); },
    }, h("i", { class: "swatch", style: { background: `var(--${row.hue})` } }), row.name, h("small", {}, `${percent(row.bytes / total)} · ${bytes(row.bytes)}`)))));
    if (focused) list.querySelector(`button[data-name="${CSS.escape(focused)}"]`)?.focus();
  }

  /** What pale, full and dotted tiles mean, in the colour of the largest entry. */
  shades() {
    const states = new Set(this.kinds.map((kind) => kind.state));
    const hue = [...this.kinds].sort((a, b) => b.bytes - a.bytes)[0]?.hues[this.mode] ?? "blue";
    const item = (kind, words) => h("li", {}, h("i", { class: `swatch ${kind}`, style: { "background-color": `var(--${hue})` } }), words);
    const one = this.engine.map.slabs === this.engine.map.cells;
    byId("shades").replaceChildren(...(this.mode === "state" ? [] : [item("", "in use"), item("pale", "cached (paler)"),
      ...(states.has("pinned") ? [item("dotted", "pinned (dot)")] : [])]), h("li", {}, one ? "a tile is a slab" : `a tile is some ${count(this.engine.map.slabs / this.engine.map.cells)} slabs`));
  }

  mark(ranges) {
    this.marked = null;
    if (ranges?.length) {
      this.marked = new Set();
      for (let i = 0; i < ranges.length; i += 2) for (let cell = ranges[i]; cell <= ranges[i + 1]; cell++) this.marked.add(cell);
    }
    this.paint();
  }

  paint() {
    if (!this.tiles || this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = null; this.now(); });
  }

  /** Lay tiles out from edge to edge, as large as fit: squares, or wide tiles for a pool of few slabs. */
  lay() {
    const width = this.width || this.canvas.parentNode.clientWidth, n = this.tiles.length;
    const tall = Math.max(190, Math.min(420, width * 0.44));
    const of = (columns) => ({ columns, rows: Math.ceil(n / columns), wide: width / columns, high: Math.min(TALLEST, width / columns) });
    let best = of(Math.min(n, Math.max(1, Math.floor(width / 4))));
    for (let rows = best.rows + 1; rows <= n; rows++) {
      const next = of(Math.ceil(n / rows));
      if (next.rows * next.high > tall) break;
      best = next;
    }
    return { ...best, width, height: Math.ceil(best.rows * best.high) };
  }

  /** Left and top edge of a tile. */
  place(i) {
    return [(i % this.plan.columns) * this.plan.wide, Math.floor(i / this.plan.columns) * this.plan.high];
  }

  now() {
    const began = performance.now();
    const { canvas, brush, tiles } = this;
    const plan = (this.plan = this.lay());
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(plan.width * scale) || canvas.height !== Math.round(plan.height * scale)) {
      canvas.width = Math.round(plan.width * scale);
      canvas.height = Math.round(plan.height * scale);
      canvas.style.setProperty("height", `${plan.height}px`);
    }
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.clearRect(0, 0, plan.width, plan.height);
    const hues = this.kinds.map((kind) => colour(kind.hues[this.mode]));
    const seen = this.kinds.map((kind) => this.only === null || kind.names[this.mode] === this.only);
    const gap = plan.high >= 12 ? 2 : plan.high >= 6 ? 1 : 0.5, wide = plan.wide - gap, high = plan.high - gap;
    const free = colour("free"), light = colour("ink"), fresh = colour("card"), ring = colour("accent");
    const one = this.engine.map.slabs === tiles.length; // a tile is one slab: show its pages
    for (let i = 0; i < tiles.length; i++) {
      const [x, y] = this.place(i);
      const faded = this.marked !== null && !this.marked.has(i);
      brush.globalAlpha = faded ? 0.3 : 1;
      brush.fillStyle = free;
      brush.fillRect(x, y, wide, high);
      const tile = tiles[i];
      if (!tile.length) continue;
      const per = this.kinds[tile[0][0]].per, across = Math.ceil(Math.sqrt((per * wide) / high));
      if (one && per > 1 && wide / across >= 3) this.pages(tile, x, y, wide, high, per, across, hues, seen, faded);
      else this.stack(tile, x, y, wide, high, hues, seen, faded);
      const since = this.glow.get(i);
      if (since !== undefined) {
        const left = 1 - (began - since) / GLOW_MS;
        if (left <= 0) this.glow.delete(i);
        else { brush.globalAlpha = 0.75 * left; brush.fillStyle = fresh; brush.fillRect(x, y, wide, high); }
      }
    }
    brush.globalAlpha = 1;
    if (this.marked) {
      brush.strokeStyle = ring;
      brush.lineWidth = plan.high >= 10 ? 2 : 1;
      for (const i of this.marked) {
        const [x, y] = this.place(i);
        brush.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
      }
    }
    if (this.at !== null) {
      brush.strokeStyle = light;
      brush.lineWidth = 2;
      const [x, y] = this.place(this.at);
      brush.strokeRect(x - 0.5, y - 0.5, wide + 1, high + 1);
    }
    performance.measure("kvloom map", { start: began, end: performance.now() });
    if (this.glow.size) this.paint();
  }

  /** Opacity of a kind: coloured by kind or tenant, cached pages are paler than pages in use. */
  strength(kind, seen, faded) {
    const base = this.mode !== "state" && kind.state === "cached" ? 0.5 : 1;
    return base * (seen ? 1 : 0.12) * (faded ? 0.3 : 1);
  }

  stack(tile, x, y, wide, tall, hues, seen, faded) {
    let bottom = y + tall;
    for (const [what, share] of tile) {
      const high = Math.max(0.6, (tall * share) / 1000);
      this.brush.globalAlpha = this.strength(this.kinds[what], seen[what], faded);
      this.brush.fillStyle = hues[what];
      bottom -= high;
      this.brush.fillRect(x, Math.max(y, bottom), wide, Math.min(high, bottom + high - y));
      if (this.kinds[what].state === "pinned" && tall >= 7) this.stud(x, bottom, wide);
    }
  }

  pages(tile, x, y, wide, high, per, across, hues, seen, faded) {
    const step = wide / across, down = high / Math.ceil(per / across), side = Math.max(1, step - 1), tall = Math.max(1, down - 1);
    let place = 0;
    for (const [what, share] of tile) {
      this.brush.globalAlpha = this.strength(this.kinds[what], seen[what], faded);
      this.brush.fillStyle = hues[what];
      for (let n = Math.round((share * per) / 1000); n > 0 && place < per; n--, place++) {
        this.brush.fillRect(x + (place % across) * step, y + Math.floor(place / across) * down, side, tall);
      }
    }
  }

  stud(x, y, wide) {
    this.brush.fillStyle = colour("card");
    this.brush.fillRect(x + wide / 2 - 1.5, y + 2, 3, 3);
  }

  tileAt(event) {
    if (!this.plan) return null;
    const column = Math.floor(event.offsetX / this.plan.wide), row = Math.floor(event.offsetY / this.plan.high);
    const i = row * this.plan.columns + column;
    return column < this.plan.columns && i >= 0 && i < this.tiles.length ? i : null;
  }

  words(i) {
    const { slabs, cells } = this.engine.map;
    const first = 1 + Math.floor((i * slabs) / cells), last = Math.floor(((i + 1) * slabs) / cells);
    const head = first === last ? `slab ${count(first)}` : `slabs ${count(first)} to ${count(last)}`;
    const parts = this.tiles[i].map(([what, share]) => {
      const kind = this.kinds[what];
      const whose = this.engine.tenants.length > 1 && kind.state !== "unbacked" ? `, ${kind.names.tenant}` : "";
      return `${percent(share / 1000)} ${kind.state === "unbacked" ? "unbacked" : `${kind.names.kind} ${kind.state}${whose}`}`;
    });
    return `${head}\n${parts.join("\n") || "free"}`;
  }

  point(i, x, y) {
    if (i === null) { this.at = null; noTip(); this.paint(); return; }
    if (i !== this.at) { this.at = i; this.paint(); }
    tip(this.words(i), x, y);
  }

  key(event) {
    if (!this.plan) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.plan.columns, ArrowDown: this.plan.columns, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") { this.at = null; noTip(); this.paint(); }
    if (by === undefined) return;
    event.preventDefault();
    const to = this.at === null ? 0 : Math.max(0, Math.min(this.tiles.length - 1, this.at + by));
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.place(to);
    this.point(to, box.left + x, box.top + y + 10);
    byId("map-said").textContent = this.words(to).replaceAll("\n", ", ");
  }

  tabled() {
    const rows = [...this.kinds].sort((a, b) => b.bytes - a.bytes).map((kind) => ({
      key: `${kind.group} ${kind.tenant} ${kind.state}`, print: String(kind.pages),
      cells: () => [kind.names.kind, kind.state, kind.names.tenant, count(kind.pages), bytes(kind.bytes)],
    }));
    table(byId("map-table"), "Pages of the pool", [["group"], ["state"], ["tenant"], ["pages", 1], ["bytes", 1]], rows);
  }
}
