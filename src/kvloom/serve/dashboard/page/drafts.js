// Speculation: acceptance by position in the draft, tokens per draft, time saved, and the controller's decisions.
// Hidden while the engine has no proposer.

import { byId, compact, h, percent, seconds } from "./dom.js";

const MOST = 8;

export class Drafts {
  draw({ totals }) {
    const { count, proposed, accepted, saved_seconds: saved, decisions } = totals.drafts;
    const names = Object.keys(decisions);
    byId("drafts").hidden = !count && !names.length;
    if (byId("drafts").hidden) return;
    byId("drafts-verified").hidden = !count;
    const sum = (numbers) => numbers.reduce((all, n) => all + n, 0), tokens = sum(accepted);
    byId("drafts-about").textContent = count
      ? `${compact(count)} drafts, ${(sum(proposed) / count).toFixed(1)} draft tokens each, ${percent(tokens / sum(proposed))} of them accepted, ${(1 + tokens / count).toFixed(2)} tokens per draft and step. `
        + (saved > 0 ? `About ${seconds(saved)} saved.` : "No time saved.")
      : "No draft was verified yet.";
    byId("drafts-bars").replaceChildren(...proposed.slice(0, MOST).map((n, place) => h("li", {},
      h("span", {}, `draft token ${place + 1}`),
      h("span", { class: "track" }, h("i", { style: { width: `${n ? (100 * accepted[place]) / n : 0}%` } })),
      h("b", {}, percent(n ? accepted[place] / n : 0)), h("b", { class: "quiet" }, compact(n)))));
    byId("drafts-decisions").replaceChildren(...names.map((name) => h("li", {}, h("span", {}, `${name} is ${decisions[name]}`))));
  }
}
