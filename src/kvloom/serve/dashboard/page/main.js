// The page's main loop: fetches the state while the page is visible, and passes it to the parts that draw.

import { byId, bytes, forgetColours, seconds } from "./dom.js";
import { Ages } from "./ages.js";
import { Curves } from "./curves.js";
import { Drafts } from "./drafts.js";
import { PoolMap } from "./poolmap.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";
import { Tiers } from "./tiers.js";
import { Tree } from "./tree.js";

const KEY = "kvloom key", THEME = "kvloom theme";
const curves = new Curves(), map = new PoolMap(), tiers = new Tiers(), tenants = new Tenants(), ages = new Ages(), drafts = new Drafts(), requests = new Requests();
const tree = new Tree((branch) => map.mark(branch?.cells ?? null));
let model = null; // the chosen one; null: the server's first
let paused = false, failures = 0, timer = null, shownAt = null, told = "", asked = 0, round = 0;

class Refused extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) }).catch((error) => { throw new Refused(0, error.message); });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, body.error?.message ?? answer.statusText);
  }
  return answer.json();
}

async function turn() {
  clearTimeout(timer);
  const mine = ++round; // of two concurrent turns the later one continues
  let wait = 1000;
  if (!paused && !document.hidden) {
    try {
      const state = await ask(`kvloom/state${model === null ? "" : `?model=${encodeURIComponent(model)}`}`);
      wait = 1000 * state.interval;
      failures = 0;
      show(state);
      if (asked++ % 2 === 0) await showRequests();
    } catch (error) {
      wait = failed(error);
      if (wait === null) return;
    }
  }
  if (mine === round) timer = setTimeout(turn, wait);
}

async function showRequests() {
  try {
    requests.draw((await ask(`kvloom/requests?limit=50${model === null ? "" : `&model=${encodeURIComponent(model)}`}`)).requests);
  } catch (error) {
    if (error.status === 404) requests.draw(null);
    else throw error;
  }
}

function failed(error) {
  if (error.status === 401 || error.status === 403) {
    signIn(error.status === 401 && !sessionStorage.getItem(KEY) ? null : error.message);
    return null;
  }
  if (error.status === 404 && model !== null) { // the chosen model was unloaded
    model = null;
    return 0;
  }
  if (!(error instanceof Refused)) console.error(error); // a fault of the page, not the server's
  failures += 1;
  status("lost", "no response");
  say("The server does not respond; retrying.");
  return Math.min(15000, 1000 * 2 ** Math.min(failures, 4));
}

function show(state) {
  const began = performance.now();
  byId("signin").hidden = true;
  byId("shown").hidden = false;
  const { server, engine } = state;
  byId("model").textContent = server.model;
  document.title = `${server.model} · kvloom`;
  showModels(server);
  const about = [server.device, server.dtype, server.pool_bytes && `${bytes(server.pool_bytes)} pool`, `up ${seconds(Math.round(state.now - server.since))}`,
    server.restarts ? `engine restarted ${server.restarts}×` : ""];
  byId("about").textContent = about.filter(Boolean).join(" · ");
  const late = state.engine_at === null ? null : state.now - state.engine_at;
  if (server.status !== "ok") status("waiting", server.status);
  else if (late !== null && late > 5) status("waiting", `busy, snapshot is ${seconds(Math.round(late))} old`);
  else status("live", "live");
  curves.draw(state.history, state.totals);
  if (engine !== null && state.engine_at !== shownAt) {
    shownAt = state.engine_at;
    map.draw(engine);
    tiers.draw(state);
    tenants.draw(state);
    ages.draw(state);
    drafts.draw(state);
    tree.draw(engine);
  }
  performance.measure("kvloom draw", { start: began, end: performance.now() });
}

function status(kind, words) {
  const pill = byId("status");
  pill.dataset.state = kind;
  pill.lastElementChild.textContent = words;
  if (told !== words && (kind === "live" || told)) say(kind === "live" ? "Connected; the numbers are live." : `Server: ${words}.`);
  told = words;
}

function showModels(server) {
  const list = byId("models"), names = server.models;
  list.hidden = names.length < 2;
  if ([...list.options].map((option) => option.value).join("\n") !== names.join("\n")) list.replaceChildren(...names.map((name) => new Option(name)));
  if (document.activeElement !== list) list.value = server.model;
}

byId("models").addEventListener("change", (event) => {
  model = event.target.value;
  shownAt = null;
  event.target.blur();
  turn();
});

function say(words) {
  if (byId("said").textContent !== words) byId("said").textContent = words;
}

function signIn(why) {
  sessionStorage.removeItem(KEY);
  byId("shown").hidden = true;
  byId("signin").hidden = false;
  if (why) byId("signin-why").textContent = why;
  status("waiting", "waiting for a key");
  byId("key").focus();
}

byId("signin-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  turn();
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Paused" : "Pause";
  status("waiting", paused ? "paused" : "connecting");
  if (!paused) turn();
});

function theme(chosen) {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  byId("theme").lastElementChild.textContent = chosen;
  forgetColours();
  map.paint();
}
byId("theme").addEventListener("click", () => {
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(localStorage.getItem(THEME) ?? "auto") + 1) % order.length];
  localStorage.setItem(THEME, next);
  theme(next);
});
theme(localStorage.getItem(THEME) ?? "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColours(); map.paint(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => { if (details.open) { shownAt = null; turn(); } });
turn();
