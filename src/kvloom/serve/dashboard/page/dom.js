// Helpers of all parts: elements, number formats, colours, tables, the tooltip.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

// -- numbers ------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
export const compact = (n) => (n === null || n === undefined ? "–" : n < 10000 ? whole.format(n) : short.format(n));
export const percent = (x, digits = 0) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`);
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 ? n.toFixed(0) : n.toPrecision(3)} ${units[unit]}`;
}

export function seconds(x) {
  if (x === null || x === undefined) return "–";
  if (x < 0.001) return `${(x * 1e6).toFixed(0)} µs`;
  if (x < 1) return `${(x * 1000).toFixed(x < 0.01 ? 1 : 0)} ms`;
  if (x < 60) return `${x.toFixed(x < 10 ? 1 : 0)} s`;
  if (x < 3600) return `${Math.floor(x / 60)} min ${Math.round(x % 60)} s`;
  return `${Math.floor(x / 3600)} h ${Math.round((x % 3600) / 60)} min`;
}

export const ago = (x) => (x < 1.5 ? "just now" : `${seconds(Math.round(x))} ago`);

// -- colours ------------------------------------------------------------------------------------

const probe = document.createElement("i");
let cache = new Map();

/** A style sheet colour in the current theme, for the canvas. */
export function colour(name) {
  if (!cache.has(name)) {
    if (!probe.isConnected) { probe.hidden = true; document.body.append(probe); }
    probe.style.setProperty("color", `var(--${name})`);
    cache.set(name, getComputedStyle(probe).color);
  }
  return cache.get(name);
}
export const forgetColours = () => { cache = new Map(); };

const KINDS = { full: "blue", sliding: "orange", state: "pink", latent: "green", chunked: "red", cross: "sky" };
const TENANTS = ["blue", "orange", "green", "pink", "sky", "red", "yellow"];
export const STATES = { "in use": "red", cached: "sky", pinned: "yellow", unbacked: "line", unknown: "grey" };

/** A colour name for every group: its kind's, or another if two groups share a kind. */
export function groupColours(groups) {
  const unused = ["sky", "green", "red", "yellow", "pink", "orange"].filter((c) => !groups.some((g) => KINDS[g.kind] === c));
  const taken = new Set();
  return groups.map(({ kind }) => {
    const wanted = KINDS[kind] ?? "grey";
    const chosen = taken.has(wanted) ? unused.shift() ?? "grey" : wanted;
    taken.add(chosen);
    return chosen;
  });
}
export const tenantColour = (place) => (place === null ? "grey" : TENANTS[place % TENANTS.length]);
export function tenantName(tenants, place) {
  if (place === null || place === undefined) return "not seen yet";
  return place >= tenants.length ? "other tenants" : nameOf(tenants[place].name);
}
/** A tenant's name for readers; requests need not name one. */
export const nameOf = (tenant) => tenant || "unnamed";

const TIERS = { device: "blue", host: "green", disk: "orange" };
const FURTHER = ["pink", "sky", "yellow"];
/** Colour and word of a tier, the same wherever it is shown. `i` tells further tiers apart. */
export const tierHue = (tier, i = 0) => TIERS[tier] ?? FURTHER[i % FURTHER.length];
export const tierWord = (tier) => (tier === "device" ? "pool" : tier);
export const swatch = (hue, kind = "") => h("i", { class: `swatch ${kind}`, style: { "background-color": `var(--${hue})` } });
/** A legend: pairs of colour and words. */
export const marks = (pairs) => h("ul", { class: "marks" }, pairs.map(([hue, words]) => h("li", {}, swatch(hue), words)));

// -- tables and tips ----------------------------------------------------------------------------

const styled = ([, numeric, kind]) => [numeric ? "n" : "", kind ?? ""].join(" ").trim() || null;

/** Fill a table; a column is [title, numeric?, class?]. Rows that stay keep their focus: they are matched by key. */
export function table(node, caption, columns, rows) {
  if (!node.tHead) {
    node.append(h("caption", { class: "unseen" }, caption));
    node.append(h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: styled(column) }, column[0])))));
    node.append(h("tbody"));
  }
  const body = node.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = rows.map(({ key, print, cells, chosen }) => {
    const before = known.get(String(key));
    const row = before && before.dataset.print === print ? before : h("tr", { "data-key": key, "data-print": print },
      cells().map((cell, i) => h("td", { class: styled(columns[i]) }, cell)));
    row.classList.toggle("chosen", Boolean(chosen));
    return row;
  });
  const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr")?.dataset.key : null;
  if (wanted.length !== body.rows.length || wanted.some((row, i) => row !== body.rows[i])) {
    const keeps = document.activeElement;
    body.replaceChildren(...wanted);
    if (focused !== null && focused !== undefined) {
      if (keeps.isConnected) keeps.focus({ preventScroll: true });
      else body.querySelector(`tr[data-key="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
    }
  }
}

const tipNode = () => byId("tip");
export function tip(text, x, y) {
  const node = tipNode();
  node.textContent = text;
  node.hidden = false;
  const box = node.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - box.width - 14 : x + 16;
  node.style.setProperty("left", `${Math.max(6, left)}px`);
  node.style.setProperty("top", `${Math.max(6, Math.min(y + 14, innerHeight - box.height - 6))}px`);
}
export const noTip = () => { tipNode().hidden = true; };
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
