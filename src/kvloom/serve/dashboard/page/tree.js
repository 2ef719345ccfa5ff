// Hot branches of the prefix tree as lines: position by tokens, width by hits, colour by last use.

import { ago, byId, bytes, count, h, noTip, plural, s, seconds, table, tenantName, tip } from "./dom.js";

const MOST_ROWS = 24, TALL = 400, LEFT = 8, RIGHT = 52;

export class Tree {
  /** `choose` is called with the selected branch, or null. */
  constructor(choose) {
    this.choose = choose;
    this.chosen = null;
    this.body = byId("tree-body");
    this.nodes = new Map();
    new ResizeObserver(([{ contentRect }]) => {
      const before = this.width;
      this.width = contentRect.width;
      if (this.engine && before !== this.width) this.draw(this.engine);
    }).observe(this.body);
  }

  pick(id) {
    this.chosen = this.chosen === id ? null : id;
    this.draw(this.engine);
    const branch = this.engine.tree.branches.find((one) => one.id === this.chosen) ?? null;
    this.choose(branch);
    byId("said").textContent = branch ? `Branch ${branch.id} is marked on the map.` : "No branch is marked.";
  }

  draw(engine) {
    this.engine = engine;
    const { branches, nodes, roots } = engine.tree;
    if (this.chosen && !branches.some((one) => one.id === this.chosen)) { this.chosen = null; this.choose(null); }
    const rows = this.arranged(branches);
    const shown = new Set(rows.flatMap(({ branch }) => branch.id));
    byId("tree-about").textContent = nodes
      ? `${plural(nodes, "branch", "branches")} of ${plural(roots, "root")}, ${shown.size < nodes ? `the ${count(shown.size)} hottest` : "all"} shown. Select one to mark it on the map.`
      : "Nothing cached yet.";
    const width = Math.max(300, this.width || this.body.clientWidth), pitch = Math.max(16, Math.min(26, TALL / Math.max(1, this.slots))), height = Math.max(60, this.slots * pitch + 34);
    const far = Math.max(64, ...rows.map(({ branch }) => branch.depth + branch.tokens));
    const x = (tokens) => LEFT + (width - LEFT - RIGHT) * Math.sqrt(tokens / far);
    const y = (slot) => 10 + slot * pitch;
    const focused = document.activeElement?.closest?.(".branch")?.dataset.id;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Hot branches of the prefix tree. Arrow keys move, Enter marks one on the map." });
    svg.append(...this.axis(far, x, height));
    this.nodes.clear();
    this.last = new Map(rows.map((row) => [row.slot, row.branch.id])); // the last branch of each row
    for (const row of [...rows].reverse()) svg.append(this.thread(row, x, y));
    if (engine.tenants.length > 1) {
      for (const { branch, slot } of rows.filter((row) => row.from === null)) svg.append(s("text", { x: LEFT - 4, y: y(slot) - 11 }, tenantName(engine.tenants, branch.tenant)));
    }
    this.order = rows.map(({ branch }) => branch.id);
    const first = this.nodes.get(focused) ?? this.nodes.get(this.order[0]);
    first?.setAttribute("tabindex", "0");
    this.body.replaceChildren(svg);
    if (focused) first?.focus({ preventScroll: true });
    if (byId("tree-table").closest("details").open) this.tabled(branches, engine.tenants);
  }

  /** Place the branches: the hottest child continues its parent's row, others get rows below, up to MOST_ROWS. */
  arranged(branches) {
    const below = new Map();
    for (const branch of branches) below.set(branch.parent, [...(below.get(branch.parent) ?? []), branch]);
    for (const list of below.values()) list.sort((a, b) => b.hits - a.hits || a.idle - b.idle);
    const rows = [];
    let slot = -1;
    const visit = (branch, from, straight) => {
      if (!straight) {
        const step = from === null && this.engine.tenants.length > 1 ? 2 : 1; // space for the tenant's name
        if (slot + step >= MOST_ROWS) return;
        slot += step;
      }
      const row = { branch, slot, from };
      rows.push(row);
      for (const [i, child] of (below.get(branch.id) ?? []).entries()) visit(child, row, i === 0);
    };
    for (const root of below.get(null) ?? []) visit(root, null, false);
    this.slots = slot + 1;
    return rows;
  }

  axis(far, x, height) {
    const ticks = [0];
    for (let t = 16; t < far; t *= 4) if (x(t) - x(ticks.at(-1)) > 56) ticks.push(t);
    if (x(far) - x(ticks.at(-1)) > 70) ticks.push(far);
    return ticks.flatMap((t) => [
      s("line", { class: "axis", x1: x(t), x2: x(t), y1: 0, y2: height - 20, "stroke-dasharray": "2 4" }),
      s("text", { x: x(t), y: height - 6, "text-anchor": t ? "middle" : "start" }, t ? count(t) : "token 0"),
    ]);
  }

  thread({ branch, slot, from }, x, y) {
    const start = x(branch.depth), end = Math.max(start + 5, x(branch.depth + branch.tokens)), at = y(slot);
    let path = `M${start} ${at}H${end}`;
    if (from && from.slot !== slot) {
      const up = y(from.slot), bend = Math.min(26, Math.max(10, end - start));
      path = `M${start} ${up}C${start + bend * 0.6} ${up} ${start + bend * 0.2} ${at} ${start + bend} ${at}H${Math.max(end, start + bend + 3)}`;
    }
    const wide = Math.min(13, 2 + 1.7 * Math.log2(1 + branch.hits));
    const heat = branch.users || branch.idle < 3 ? 0 : branch.idle < 15 ? 1 : branch.idle < 60 ? 2 : branch.idle < 300 ? 3 : 4;
    const node = s("g", {
      class: `branch${this.chosen === branch.id ? " chosen" : ""}`, role: "button", tabindex: -1, "data-id": branch.id,
      "aria-pressed": String(this.chosen === branch.id), "aria-label": this.words(branch).replaceAll("\n", ", "),
      onclick: () => this.pick(branch.id),
      onkeydown: (event) => this.key(event, branch.id),
      onpointermove: (event) => tip(this.words(branch), event.clientX, event.clientY),
      onpointerleave: noTip,
      onfocus: (event) => { if (event.target.matches(":focus-visible")) { const box = event.target.getBoundingClientRect(); tip(this.words(branch), box.left + 20, box.bottom - 8); } },
      onblur: noTip,
    },
    s("path", { class: "halo", d: path, "stroke-width": wide + 7 }),
    s("path", { class: "thread", d: path, "stroke-width": wide, style: { stroke: `var(--heat-${heat})` } }),
    this.last.get(slot) === branch.id && branch.hits > 1
      ? s("text", { x: Math.max(end, start + 29) + wide / 2 + 6, y: at + 3.5 }, `${count(branch.hits)}×`) : null);
    this.nodes.set(branch.id, node);
    return node;
  }

  words(branch) {
    const { tenants } = this.engine;
    return [
      `branch ${branch.id}${tenants.length > 1 ? `, ${tenantName(tenants, branch.tenant)}` : ""}`,
      `${plural(branch.tokens, "token")} from token ${count(branch.depth)}`,
      `${plural(branch.hits, "hit")}, used ${ago(branch.idle)}, ${seconds(branch.age)} old`,
      ...(branch.users ? [`${plural(branch.users, "request")} on it now`] : []),
      ...(branch.snapshots ? [plural(branch.snapshots, "checkpoint")] : []),
    ].join("\n");
  }

  key(event, id) {
    const at = this.order.indexOf(id);
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: this.order.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.pick(id); return; }
    if (event.key === "Escape" && this.chosen) { this.pick(this.chosen); return; }
    const next = this.nodes.get(this.order[to]);
    if (to === undefined || !next) return;
    event.preventDefault();
    this.nodes.get(id).setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  tabled(branches, tenants) {
    const rows = [...branches].sort((a, b) => b.hits - a.hits || a.idle - b.idle).map((branch) => ({
      key: branch.id, chosen: branch.id === this.chosen, print: `${branch.hits} ${branch.tokens} ${Math.round(branch.idle)} ${branch.users}`,
      cells: () => [
        h("button", { type: "button", class: "mono", onclick: () => this.pick(branch.id) }, branch.id), tenantName(tenants, branch.tenant),
        count(branch.depth), count(branch.tokens), count(branch.hits), ago(branch.idle), seconds(branch.age), bytes(branch.bytes),
      ],
    }));
    table(byId("tree-table"), "Hot branches", [["branch"], ["tenant"], ["from token", 1], ["tokens", 1], ["hits", 1], ["used", 1], ["age", 1], ["bytes", 1]], rows);
  }
}
