// The page of a router: its workers, and what flows between them.

import { byId, compact, count, h, marks, noTip, percent, plural, s, seconds, swatch, table, tip } from "./dom.js";
import { Curves, FLEET } from "./curves.js";
import { Shell } from "./shell.js";

const WIDTH = 1000, ROW = 62, BOX = 44, WIDE = 270;
const ROLES = { prefill: "orange", decode: "blue", both: "green", encode: "yellow" };
const FEEDS = ["prefill", "encode"]; // roles that compute for other workers
const curves = new Curves(FLEET);
const rates = new Map(); // requests and hand-overs a second by line, smoothed
let before = null;

const shell = new Shell({ path: () => "kvloom/state", show });

function show(state) {
  const { router, workers, totals } = state;
  const alive = workers.filter((worker) => worker.alive).length;
  document.title = `${plural(workers.length, "worker")} · kvloom`;
  byId("about").textContent = [`${alive} of ${plural(workers.length, "worker")} alive`, router.models.join(", "), router.route === "kv" ? "" : router.route,
    `${compact(router.index_blocks)} blocks in the index`, `up ${seconds(Math.round(state.now - router.since))}`].filter(Boolean).join(" · ");
  if (alive) shell.status("live", "live");
  else shell.status("waiting", "no worker is alive");
  curves.draw(state.history, totals);
  measure(state);
  drawFlows(state);
  drawWorkers(workers);
}

const shortName = (name) => name.replace(/^https?:\/\//, "");

/** Requests and hand-overs of each line, and how many a second. */
function lines(workers) {
  const found = [];
  for (const worker of workers) {
    if (worker.role !== "encode") found.push({ key: `r ${worker.name}`, from: null, to: worker.name, total: worker.requests, hue: ROLES[worker.role] });
    for (const [to, total] of Object.entries(worker.hand_overs)) found.push({ key: `h ${worker.name} ${to}`, from: worker.name, to, total, hue: "pink" });
    const prefills = Object.values(worker.hand_overs).reduce((a, b) => a + b, 0);
    if (prefills && worker.role !== "encode") found[found.findIndex((line) => line.key === `r ${worker.name}`)].total += prefills;
  }
  return found;
}

function measure({ now, workers }) {
  const totals = new Map(lines(workers).map((line) => [line.key, line.total]));
  if (before && now > before.now) {
    for (const [key, total] of totals) {
      const rate = Math.max(0, (total - (before.totals.get(key) ?? total)) / (now - before.now));
      const smooth = (rates.get(key) ?? rate) * 0.7 + rate * 0.3;
      rates.set(key, smooth < 0.02 ? 0 : smooth);
    }
  }
  if (!before || now > before.now) before = { now, totals };
}

function drawFlows({ router, workers, totals }) {
  const feeding = workers.filter((worker) => FEEDS.includes(worker.role)), others = workers.filter((worker) => !FEEDS.includes(worker.role));
  const split = feeding.length > 0, has = (role) => workers.some((worker) => worker.role === role);
  const height = ROW * Math.max(1, feeding.length, others.length) + 8;
  const y = (i, n) => ((i + 0.5) * height) / Math.max(1, n);
  const places = new Map([...feeding.map((worker, i) => [worker.name, { x: 350, y: y(i, feeding.length), worker }]),
    ...others.map((worker, i) => [worker.name, { x: WIDTH - WIDE, y: y(i, others.length), worker }])]);
  const all = lines(workers).filter((line) => places.has(line.to)), most = Math.max(0.1, ...all.map((line) => rates.get(line.key) ?? 0));
  const paths = all.map((line) => {
    const start = line.from === null ? { x: 150, y: height / 2 } : { x: 350 + WIDE, y: places.get(line.from).y };
    const end = places.get(line.to), rate = rates.get(line.key) ?? 0, bend = (end.x - start.x) / 2;
    const over = line.from === null && split && !FEEDS.includes(end.worker.role); // passes the prefill and encode workers
    const low = height + 12;
    const d = over ? `M${start.x} ${start.y}C${start.x + 90} ${start.y} ${start.x + 90} ${low} 350 ${low}L${350 + WIDE} ${low}C${end.x - 40} ${low} ${end.x - 60} ${end.y + 12} ${end.x} ${end.y + 12}`
      : `M${start.x} ${start.y}C${start.x + bend} ${start.y} ${end.x - bend} ${end.y} ${end.x} ${end.y}`;
    const words = `${line.from === null ? "router" : shortName(line.from)} → ${shortName(line.to)}: ${line.from === null ? plural(line.total, "request") : plural(line.total, "hand-over")}, ${rate.toFixed(1)}/s`;
    return s("path", { d, class: `flow-line${rate > 0 ? " on" : ""}`, "data-key": line.key, style: { stroke: `var(--${line.total ? line.hue : "line"})`, "stroke-width": 1.5 + (5 * rate) / most },
      onpointermove: (event) => tip(words, event.clientX, event.clientY), onpointerleave: noTip });
  });
  const boxes = [...places.values()].map(({ x, y: at, worker }) => workerBox(worker, shortName(worker.name), x, at));
  const size = 40;
  const middle = s("g", { class: "box" }, s("rect", { x: 4, y: height / 2 - size / 2 - 8, width: 146, height: size + 16, rx: 10 }),
    s("text", { x: 18, y: height / 2 - 6, class: "name" }, "router"), s("text", { x: 18, y: height / 2 + 12 }, `${count(router.running)} running, ${count(router.waiting)} waiting`));
  const words = workers.map((worker) => `${shortName(worker.name)}, ${worker.role}, ${worker.alive ? "alive" : "dead"}: ${plural(worker.requests, "request")}`).join("; ");
  byId("flows-body").replaceChildren(s("svg", { viewBox: `0 0 ${WIDTH} ${height + 24}`, role: "img", "aria-label": `Requests from the router to its workers. ${words}.` }, paths, middle, boxes));
  byId("flows-about").textContent = [`${compact(totals.requests)} requests`, `${compact(totals.hand_overs)} handed over`, plural(totals.failovers, "failover"), plural(totals.copied_prefixes, "copied prefix", "copied prefixes"),
    plural(totals.continued_streams, "continued stream"), `${plural(totals.deaths, "death")} of workers`].join(" · ");
  const key = marks([...(has("prefill") ? [["orange", "prefill"], ["blue", "decode"]] : []), ...(has("encode") ? [["yellow", "encode"]] : []), ...(has("both") ? [["green", "requests"]] : []),
    ...(has("prefill") ? [["pink", "pages, prefill → decode"]] : []), ...(has("encode") ? [["pink", "embeddings of images"]] : [])]);
  byId("flows-key").replaceChildren(...key.childNodes);
}

function workerBox(worker, name, x, at) {
  const share = Math.min(1, worker.used), left = x + 14;
  return s("g", { class: `box${worker.alive ? "" : " dead"}` }, s("rect", { x, y: at - BOX / 2 - 4, width: WIDE - 4, height: BOX + 8, rx: 10 }),
    s("circle", { cx: left + 4, cy: at - 11, r: 5, style: { fill: `var(--${worker.alive ? ROLES[worker.role] : "red"})` } }),
    s("text", { x: left + 16, y: at - 6, class: "name" }, name),
    s("text", { x: x + WIDE - 18, y: at - 6, "text-anchor": "end" }, worker.alive ? worker.role : "dead"),
    s("text", { x: left, y: at + 11 }, worker.role === "encode" ? `${count(worker.waiting)} waiting · ${compact(worker.images)} images encoded`
      : `${count(worker.running)} running, ${count(worker.waiting)} waiting · ${compact(worker.blocks.GPU ?? 0)} blocks`),
    s("rect", { class: "level", x: left, y: at + 16, width: WIDE - 32, height: 4, rx: 2 }),
    s("rect", { class: "filled", x: left, y: at + 16, width: (WIDE - 32) * share, height: 4, rx: 2 }));
}

const COLUMNS = [["worker"], ["role", 0, "middle"], ["state"], ["running", 1], ["waiting", 1], ["requests", 1, "middle"], ["hit rate", 1], ["first token p50", 1, "middle"], ["p95", 1, "wide"],
  ["blocks in the pool", 1], ["tiers", 1, "wide"], ["failures", 1, "middle"]];

function drawWorkers(workers) {
  const rows = workers.map((worker) => {
    const rate = worker.prompt_tokens ? worker.cached_tokens / worker.prompt_tokens : null;
    const media = Object.entries(worker.blocks).filter(([medium, blocks]) => medium !== "GPU" && blocks).map(([medium, blocks]) => `${medium} ${compact(blocks)} blocks`);
    const tiers = worker.tiers.map((tier) => `${tier.name} ${compact(tier.pages)} pages`);
    const cells = [
      shortName(worker.name), worker.role, worker.alive ? "alive" : "dead", count(worker.running), count(worker.waiting), compact(worker.requests), percent(rate), seconds(worker.ttft.p50),
      seconds(worker.ttft.p95), `${compact(worker.blocks.GPU ?? 0)} (${percent(worker.used)})`, [...media, ...tiers].join(", ") || "–", count(worker.failures),
    ];
    const state = () => [swatch(worker.alive ? "green" : "red"), ` ${cells[2]}`];
    return { key: worker.name, print: JSON.stringify(cells), cells: () => cells.map((cell, i) => (i === 2 ? state() : cell)) };
  });
  table(byId("workers-table"), "Workers", COLUMNS, rows);
  if (!workers.length) byId("workers-about").textContent = "No workers yet: start the router with --worker, or POST /register.";
}
