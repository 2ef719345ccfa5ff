// The page of a server: passes its state to the parts that draw.

import { byId, bytes, seconds } from "./dom.js";
import { Ages } from "./ages.js";
import { Curves, SERVER } from "./curves.js";
import { Drafts } from "./drafts.js";
import { PoolMap } from "./poolmap.js";
import { Pools } from "./pools.js";
import { Requests } from "./requests.js";
import { ask, Shell } from "./shell.js";
import { Tenants } from "./tenants.js";
import { Tiers } from "./tiers.js";
import { Timeline } from "./timeline.js";
import { Tree } from "./tree.js";

const curves = new Curves(SERVER), map = new PoolMap(), tiers = new Tiers(), tenants = new Tenants(), ages = new Ages(), drafts = new Drafts(), requests = new Requests();
const tree = new Tree((branch) => map.mark(branch?.cells ?? null));
const timeline = new Timeline(() => shell.turn()), pools = new Pools(choose);
let model = null; // the chosen one; null: the server's first
let shownAt = null, asked = 0;

const shell = new Shell({
  path: () => `kvloom/state${query(timeline.parameter("at"))}`,
  show,
  missing: () => { // the chosen model was unloaded
    const known = model !== null || timeline.at !== null;
    model = null;
    timeline.choose(null);
    return known;
  },
  repaint: () => map.paint(),
  opened: () => { shownAt = null; },
});

function show(state) {
  const { server, engine } = state;
  byId("model").textContent = server.model;
  document.title = `${server.model} · kvloom`;
  showModels(server);
  const about = [server.device, server.dtype, server.pool_bytes && `${bytes(server.pool_bytes)} pool`, `up ${seconds(Math.round(state.now - server.since))}`,
    server.restarts ? `engine restarted ${server.restarts}×` : ""];
  byId("about").textContent = about.filter(Boolean).join(" · ");
  const late = state.engine_at === null ? null : state.now - state.engine_at;
  if (timeline.at !== null) shell.status("waiting", `past: ${new Date(state.now * 1000).toLocaleTimeString()}`);
  else if (server.status !== "ok") shell.status("waiting", server.status);
  else if (late !== null && late > 5) shell.status("waiting", `busy, snapshot is ${seconds(Math.round(late))} old`);
  else shell.status("live", "live");
  timeline.draw(state);
  curves.draw(state.history, state.totals, timeline.at === null ? null : state.now);
  pools.draw(state);
  if (engine !== null && state.engine_at !== shownAt) {
    shownAt = state.engine_at;
    map.draw(engine);
    tiers.draw(state);
    tenants.draw(state);
    ages.draw(state);
    drafts.draw(state);
    tree.draw(engine);
  }
  return asked++ % 2 === 0 || timeline.at !== null ? showRequests() : null;
}

async function showRequests() {
  try {
    requests.draw((await ask(`kvloom/requests${query("limit=50", timeline.parameter("until"))}`)).requests);
  } catch (error) {
    if (error.status === 404) requests.draw(null);
    else throw error;
  }
}

/** The query of an address: the given parameters, and the chosen model. */
function query(...parameters) {
  const all = [...parameters, model === null ? null : `model=${encodeURIComponent(model)}`].filter(Boolean);
  return all.length ? `?${all.join("&")}` : "";
}

function choose(name) {
  model = name;
  shownAt = null;
  asked = 0;
  shell.turn();
}

function showModels(server) {
  const list = byId("models"), names = server.models;
  list.hidden = names.length < 2;
  if ([...list.options].map((option) => option.value).join("\n") !== names.join("\n")) list.replaceChildren(...names.map((name) => new Option(name)));
  if (document.activeElement !== list) list.value = server.model;
}

byId("models").addEventListener("change", (event) => {
  event.target.blur();
  choose(event.target.value);
});
