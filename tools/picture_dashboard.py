"""Pictures of the dashboard for the documents: a real server on an embedded model under load, seen by a real browser.

    .venv/bin/python tools/picture_dashboard.py docs/images --pool 24MiB --tier host:24MiB --tier disk:FOLDER:1GiB --speculate suffix

Needs playwright, pillow and a Chromium. Starts a server of three tenants, sends requests for a while, and writes the files of
PICTURES and dashboard-request.png. Options that it does not know are those of `kvloom serve`. Run it on an idle machine, or the
pictures show the latency of a busy one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["main"]

TENANTS = ("search", "assistant", "batch")
OVERVIEW_HEIGHT = 890
PICTURES = (
    ("overview", "light", 1280, False),
    ("overview-dark", "dark", 1280, False),
    ("dashboard", "light", 1280, True),
    ("dashboard-phone", "light", 390, True),
)
"""Name, colour scheme and width of each picture, and whether it shows the whole page instead of its top."""
TOPICS = ("json", "argparse", "heapq", "csv", "textwrap", "random", "bisect", "queue")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--model", default="kvloom-hybrid", help="default: kvloom-hybrid")
    parser.add_argument("--pool", default="96MiB", help="memory for the cache (default: 96MiB)")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long to send requests (default: 90)")
    parser.add_argument("--clients", type=int, default=7, help="number of clients (default: 7)")
    args, more = parser.parse_known_args()
    keys = {name: secrets.token_hex(16) for name in (*TENANTS, "admin")}
    with serving(args.model, args.pool, keys, more) as url:
        stop = threading.Event()
        threads = [
            threading.Thread(target=talk, args=(url, keys[name], seed, stop), daemon=True)
            for seed, name in enumerate(itertools.islice(itertools.cycle(TENANTS), args.clients))
        ]
        for thread in threads:
            thread.start()
        time.sleep(args.seconds)
        args.folder.mkdir(parents=True, exist_ok=True)
        take(url, keys["admin"], args.folder)
        stop.set()
        for thread in threads:
            thread.join(20)


@contextmanager
def serving(model: str, pool: str, keys: dict[str, str], more: list[str]) -> Iterator[str]:
    """Start a server with these keys, and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        rules = {
            key: {"tenant": "search" if name == "admin" else name, "admin": name == "admin"}
            for name, key in keys.items()
        }
        file.touch(0o600)
        file.write_text(json.dumps(rules), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "serve", model, "--port", "0", "--pool", pool, "--api-keys", str(file), *more],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r" at (http://\S+);", line):
                    threading.Thread(target=process.stdout.read, daemon=True).start()
                    yield found[1]
                    break
            else:
                raise SystemExit("the server did not start")
        finally:
            process.terminate()
            process.wait(60)


def talk(url: str, key: str, seed: int, stop: threading.Event) -> None:
    """Send the requests of a tenant: questions about a few long documents, and conversations that continue."""
    draw = random.Random(seed)
    documents = []
    for topic in TOPICS:
        file = importlib.import_module(topic).__file__
        assert file is not None
        documents.append(Path(file).read_text(encoding="utf-8")[: draw.choice((900, 1800, 3200))])
    while not stop.is_set():
        document = documents[min(int(draw.expovariate(0.55)), len(documents) - 1)]
        prompt = document + f"\n\n# {draw.randrange(10_000)}\ndef "
        for _ in range(draw.choice((1, 1, 2, 3))):
            prompt += complete(url, key, prompt, draw.randrange(24, 120)) + "\n\ndef "
            if stop.wait(draw.uniform(0.0, 1.2)):
                return


def complete(url: str, key: str, prompt: str, tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.9, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    text = ""
    with suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                text += choices[0].get("text", "")
    return text


def take(url: str, key: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, scheme, width, whole in PICTURES:
            page = browser.new_page(
                viewport={"width": width, "height": OVERVIEW_HEIGHT},
                color_scheme=scheme,  # type: ignore[arg-type]
            )
            page.goto(f"{url}/dashboard")
            page.fill("#key", key)
            page.press("#key", "Enter")
            page.wait_for_selector("#legend button")
            page.wait_for_timeout(4000)
            file = folder / f"{name}.png"
            page.screenshot(path=file, full_page=whole)
            shrink(file)
            if name == "dashboard":
                take_request(page, folder / "dashboard-request.png")
            page.close()
        browser.close()


def take_request(page: Page, file: Path) -> None:
    """Take a picture of the explanation of the finished request with the most phases."""
    rows = page.locator("#requests-table tbody tr", has_text=re.compile("length|stop"))
    most, best = 0, 0
    for place in range(min(12, rows.count())):
        rows.nth(place).locator("button").click()
        page.wait_for_selector("#waterfall tbody tr")
        phases = page.locator("#waterfall tbody tr").count()
        if phases > most:
            most, best = phases, place
        page.keyboard.press("Escape")
    rows.nth(best).locator("button").click()
    page.wait_for_selector("#waterfall tbody tr")
    page.locator("#explanation").screenshot(path=file)
    shrink(file)


def shrink(file: Path) -> None:
    """Reduce a picture to 256 colours. The file then has a third of the bytes, and looks the same."""
    from PIL import Image

    with Image.open(file) as image:
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


if __name__ == "__main__":
    main()
