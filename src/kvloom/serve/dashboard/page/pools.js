// Pools of all models of the server, and cached bytes of each LoRA adapter. Hidden with one model, and without adapters.

import { byId, bytes, compact, h, percent, plural, table } from "./dom.js";

const MODELS = [["model"], ["state"], ["pool", 1], ["in use", 1], ["cached", 1], ["occupied", 1, "middle"], ["running", 1, "middle"], ["waiting", 1, "middle"], ["adapters", 1, "wide"], ["hit rate", 1]];
const ADAPTERS = [["adapter"], ["rank", 1, "wide"], ["on the device", 0, "middle"], ["cached", 1], ["of the pool", 1, "middle"], ["requests", 1], ["prompt tokens", 1, "wide"], ["hit rate", 1]];

export class Pools {
  /** `choose` selects the model that the page shows. */
  constructor(choose) { this.choose = choose; }

  draw({ models, server, engine, totals }) {
    byId("models-pools").hidden = models.length < 2;
    if (models.length > 1) this.models(models, server.model);
    byId("adapters").hidden = !engine?.adapters.length;
    if (engine?.adapters.length) this.adapters(engine, totals.adapters);
  }

  models(models, shown) {
    const sum = models.reduce((all, one) => all + (one.pool_bytes ?? 0), 0);
    byId("models-about").textContent = `${plural(models.length, "model")} with ${bytes(sum)} of pools. Select one to see its cache.`;
    table(byId("models-table"), "Models", MODELS, models.map((one) => ({
      key: one.name, print: JSON.stringify(one) + (one.name === shown), chosen: one.name === shown,
      cells: () => [
        h("button", { type: "button", "aria-pressed": String(one.name === shown), onclick: () => this.choose(one.name) }, one.name), one.status, bytes(one.pool_bytes),
        bytes(one.in_use_bytes), bytes(one.cached_bytes), one.pool_bytes ? percent((one.in_use_bytes + one.cached_bytes) / one.pool_bytes) : "–", compact(one.running),
        compact(one.waiting), compact(one.adapters), one.prompt_tokens ? percent(one.cached_tokens / one.prompt_tokens) : "–",
      ],
    })));
  }

  adapters({ adapters, pool }, uses) {
    const total = pool.slabs * pool.slab_bytes, resident = adapters.filter((one) => one.name && one.resident).length;
    byId("adapters-about").textContent = `${plural(adapters.length - 1, "adapter")}, ${resident} on the device. Blocks before the activation of an activated LoRA belong to the base model.`;
    table(byId("adapters-table"), "LoRA adapters", ADAPTERS, adapters.map((one) => {
      const use = uses[one.name] ?? {};
      return { key: one.name || "(base model)", print: JSON.stringify([one, use]), cells: () => [
        one.name || "no adapter", one.name ? compact(one.rank) : "–", one.name ? (one.resident ? "yes" : "no") : "–", bytes(one.bytes), percent(one.bytes / total),
        compact(one.requests ?? use.requests ?? 0), compact(use.prompt_tokens ?? 0), use.prompt_tokens ? percent(use.cached_tokens / use.prompt_tokens) : "–",
      ] };
    }));
  }
}
