"""The files of the dashboard's pages, with the headers that a browser gets. The pages load nothing from other hosts."""

from __future__ import annotations

from importlib import resources

__all__ = ["HEADERS", "file_type", "page_files"]

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_files() -> dict[str, bytes]:
    """Return the files of both pages by name. index.html is the page of a server, and fleet.html is the page of a
    router."""
    folder = resources.files("kvloom.serve.dashboard") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rsplit(".")[-1] in TYPES}


def file_type(name: str) -> str:
    """Return the content type of a page's file."""
    return TYPES[name.rsplit(".", maxsplit=1)[-1]]
