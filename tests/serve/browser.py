"""A real browser for the dashboard's tests, and an accessibility audit of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["AUDIT", "Seen", "missing", "open_url"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _chromium() -> str | None:
    """The Chromium of this machine, or the one that playwright has fetched for itself."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    from playwright.sync_api import sync_playwright

    with suppress(Exception), sync_playwright() as playwright:
        path = playwright.chromium.executable_path
        return path if Path(path).exists() else None
    return None


def missing() -> str:
    """Why no browser can be driven here; nothing where one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed (extra dev)"
    if _chromium() is None:
        return "there is no Chromium: `apt-get install chromium`, or `playwright install chromium`"
    return ""


@contextmanager
def open_url() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium())
        yield browser
        browser.close()


class Seen:
    """A page, and what it asked for and complained of."""

    def __init__(self, browser: Browser, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.set_default_timeout(60_000)


AUDIT = """
() => {
  const wrong = [];
  const name = (el) => {
    const by = el.getAttribute("aria-labelledby");
    if (by) return by.split(/\\s+/).map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
    const label = el.getAttribute("aria-label") ?? el.labels?.[0]?.textContent ?? el.getAttribute("alt") ?? el.textContent;
    return (label ?? "").trim();
  };
  const shown = (el) => el.checkVisibility({ visibilityProperty: true }) && el.getClientRects().length > 0;
  const controls = "a[href], button, input, select, textarea, summary, canvas, [role=button], [role=img], [role=region], [role=group], [tabindex]";
  for (const el of document.querySelectorAll(controls)) {
    if (shown(el) && el.id !== "main" && !name(el)) wrong.push(`no name: ${el.outerHTML.slice(0, 90)}`);
    if (el.tabIndex > 0) wrong.push(`tab order is forced: ${el.outerHTML.slice(0, 90)}`);
  }
  for (const el of document.querySelectorAll("img:not([alt])")) wrong.push(`no alt: ${el.src}`);
  const ids = [...document.querySelectorAll("[id]")].map((el) => el.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) wrong.push(`id twice: ${id}`);
  for (const [tag, n] of [["main", 1], ["h1", 1], ["header", null], ["footer", 1]])
    if (n !== null && document.querySelectorAll(`body > ${tag}, body > header ${tag}`).length !== n) wrong.push(`landmark ${tag}`);
  if (!document.documentElement.lang) wrong.push("no language");
  if (!document.title) wrong.push("no title");
  let level = 1;
  for (const el of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!shown(el)) continue;
    const here = Number(el.tagName[1]);
    if (here > level + 1) wrong.push(`heading jumps: ${el.textContent}`);
    level = here;
  }
  for (const th of document.querySelectorAll("th")) if (!th.scope) wrong.push(`header cell without scope: ${th.textContent}`);
  for (const table of document.querySelectorAll("table")) if (table.rows.length && !table.caption) wrong.push("table without caption");
  // Contrast of every text against what is behind it.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (el) => { for (let at = el; at; at = at.parentElement) { const c = rgba(getComputedStyle(at).backgroundColor); if (c[3] > 250) return c; } return rgba("Canvas"); };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const el = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !shown(el) || el.closest(".unseen, .skip, script, noscript, #tip, [disabled]")) continue;
    const style = getComputedStyle(el), svg = el instanceof SVGElement;
    const a = light(rgba(svg ? style.fill : style.color)), b = light(behind(el));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) wrong.push(`contrast ${ratio.toFixed(2)}: ${walk.currentNode.textContent.trim().slice(0, 40)}`);
  }
  return [...new Set(wrong)];
}
"""
"""What an audit of names, roles, order and contrast finds wrong with a page, as a list."""
