// What both pages share: the loop that fetches the state while the page is visible, status, sign-in, pause, theme.

import { byId, forgetColours } from "./dom.js";

const KEY = "kvloom key", THEME = "kvloom theme";

class Refused extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) }).catch((error) => { throw new Refused(0, error.message); });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, body.error?.message ?? answer.statusText);
  }
  return answer.json();
}

export function say(words) {
  if (byId("said").textContent !== words) byId("said").textContent = words;
}

/** The loop of a page. `path()` names the state, `show(state)` draws it, `missing()` answers a 404 with whether to try again at once,
 *  `repaint()` follows a change of theme, and `opened()` the opening of a details element. */
export class Shell {
  constructor({ path, show, missing = () => false, repaint = () => {}, opened = () => {} }) {
    Object.assign(this, { path, show, missing, repaint, opened, paused: false, failures: 0, timer: null, told: "", round: 0 });
    byId("signin-form").addEventListener("submit", (event) => this.signedIn(event));
    byId("pause").addEventListener("click", () => this.pause());
    byId("theme").addEventListener("click", () => this.nextTheme());
    this.theme(localStorage.getItem(THEME) ?? "auto");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColours(); repaint(); });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.turn(); });
    for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => { if (details.open) { opened(); this.turn(); } });
    this.turn();
  }

  /** Fetch and draw the state now, and then at its interval. A page that is paused or hidden waits. */
  async turn() {
    clearTimeout(this.timer);
    const mine = ++this.round; // of two concurrent turns the later one continues
    let wait = 1000;
    if (!this.paused && !document.hidden) {
      try {
        const state = await ask(this.path());
        if (mine !== this.round) return; // a later turn asked for another state
        wait = 1000 * state.interval;
        this.failures = 0;
        const began = performance.now();
        byId("signin").hidden = true;
        byId("shown").hidden = false;
        const more = this.show(state);
        performance.measure("kvloom draw", { start: began, end: performance.now() });
        await more;
      } catch (error) {
        wait = this.failed(error);
        if (wait === null) return;
      }
    }
    if (mine === this.round) this.timer = setTimeout(() => this.turn(), wait);
  }

  failed(error) {
    if (error.status === 401 || error.status === 403) {
      this.signIn(error.status === 401 && !sessionStorage.getItem(KEY) ? null : error.message);
      return null;
    }
    if (error.status === 404 && this.missing()) return 0;
    if (!(error instanceof Refused)) console.error(error); // a fault of the page, not the server's
    this.failures += 1;
    this.status("lost", "no response");
    say("The server does not respond; retrying.");
    return Math.min(15000, 1000 * 2 ** Math.min(this.failures, 4));
  }

  status(kind, words) {
    const pill = byId("status");
    pill.dataset.state = kind;
    pill.lastElementChild.textContent = words;
    if (this.told !== words && (kind === "live" || this.told)) say(kind === "live" ? "Connected; the numbers are live." : `Server: ${words}.`);
    this.told = words;
  }

  signIn(why) {
    sessionStorage.removeItem(KEY);
    byId("shown").hidden = true;
    byId("signin").hidden = false;
    if (why) byId("signin-why").textContent = why;
    this.status("waiting", "waiting for a key");
    byId("key").focus();
  }

  signedIn(event) {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value.trim());
    byId("key").value = "";
    this.turn();
  }

  pause() {
    this.paused = !this.paused;
    byId("pause").setAttribute("aria-pressed", String(this.paused));
    byId("pause").textContent = this.paused ? "Paused" : "Pause";
    this.status("waiting", this.paused ? "paused" : "connecting");
    if (!this.paused) this.turn();
  }

  theme(chosen) {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    byId("theme").lastElementChild.textContent = chosen;
    forgetColours();
    this.repaint();
  }

  nextTheme() {
    const order = ["auto", "light", "dark"];
    const next = order[(order.indexOf(localStorage.getItem(THEME) ?? "auto") + 1) % order.length];
    localStorage.setItem(THEME, next);
    this.theme(next);
  }
}
