// The past hour: a slider over the states that the server keeps, above a curve of the load. "Live" returns to now.

import { byId, s, seconds } from "./dom.js";
import { say } from "./shell.js";

export class Timeline {
  /** `changed` is called when another moment is chosen. */
  constructor(changed) {
    this.at = null; // the chosen Unix time; null: now
    const slider = byId("when");
    slider.addEventListener("input", () => { this.choose(Number(slider.value)); changed(); });
    byId("live").addEventListener("click", () => { this.choose(null); say("The numbers are live."); changed(); });
  }

  choose(at) {
    const slider = byId("when");
    this.at = at === null || at >= Number(slider.max) ? null : at;
    this.label();
  }

  /** Part of the address of a document: the parameter `name` with the chosen time. */
  parameter(name) {
    return this.at === null ? null : `${name}=${this.at}`;
  }

  draw({ past, now }) {
    byId("time").hidden = past.from === null || past.until - past.from < past.seconds;
    if (byId("time").hidden) return;
    const slider = byId("when");
    this.now = this.at === null ? now : this.now ?? now;
    slider.min = Math.floor(past.from);
    slider.max = Number(slider.min) + past.seconds * Math.ceil((past.until - past.from) / past.seconds);
    slider.step = past.seconds;
    if (this.at === null) slider.value = slider.max;
    const most = Math.max(1e-9, ...past.load), n = past.load.length;
    byId("time-load").replaceChildren(...past.load.flatMap((load, i) => (load ? [s("rect", { x: (120 * i) / n, width: 120 / n, y: 24 - (23 * load) / most, height: (23 * load) / most })] : [])));
    this.label();
  }

  label() {
    const words = this.at === null ? "now" : `${new Date(this.at * 1000).toLocaleTimeString()}, ${seconds(Math.max(0, Math.round(Date.now() / 1000 - this.at)))} ago`;
    byId("when-said").textContent = words;
    byId("when").setAttribute("aria-valuetext", words);
    byId("live").setAttribute("aria-pressed", String(this.at === null));
  }
}
