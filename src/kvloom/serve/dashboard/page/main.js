// The page of a server: passes its state to the parts that draw.

import { byId, bytes, seconds } from "./dom.js";
import { Ages } from "./ages.js";
import { Curves, SERVER } from "./curves.js";
import { Drafts } from "./drafts.js";
import { PoolMap } from "./poolmap.js";
import { Requests } from "./requests.js";
import { ask, Shell } from "./shell.js";
import { Tenants } from "./tenants.js";
import { Tiers } from "./tiers.js";
import { Tree } from "./tree.js";

const curves = new Curves(SERVER), map = new PoolMap(), tiers = new Tiers(), tenants = new Tenants(), ages = new Ages(), drafts = new Drafts(), requests = new Requests();
const tree = new Tree((branch) => map.mark(branch?.cells ?? null));
let model = null; // the chosen one; null: the server's first
let shownAt = null, asked = 0;

const shell = new Shell({
  path: () => `kvloom/state${model === null ? "" : `?model=${encodeURIComponent(model)}`}`,
  show,
  missing: () => { // the chosen model was unloaded
    const known = model !== null;
    model = null;
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
  if (server.status !== "ok") shell.status("waiting", server.status);
  else if (late !== null && late > 5) shell.status("waiting", `busy, snapshot is ${seconds(Math.round(late))} old`);
  else shell.status("live", "live");
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
  return asked++ % 2 === 0 ? showRequests() : null;
}

async function showRequests() {
  try {
    requests.draw((await ask(`kvloom/requests?limit=50${model === null ? "" : `&model=${encodeURIComponent(model)}`}`)).requests);
  } catch (error) {
    if (error.status === 404) requests.draw(null);
    else throw error;
  }
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
  shell.turn();
});
