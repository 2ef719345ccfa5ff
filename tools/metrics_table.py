"""Writes the tables of metrics and of deprecated names into docs/observability.md: `python tools/metrics_table.py`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from kvloom.serve.auth import RequestLimiter
from kvloom.serve.metrics import Metrics, Series, ServerMetrics, full_name, tenant_series
from kvloom.serve.worker import EngineClient, Start, TenantUsage

__all__ = ["FILE", "aliases_table", "main", "metrics_table"]

FILE = Path(__file__).parent.parent / "docs" / "observability.md"
TABLES = ("metrics", "aliases")


def all_series() -> list[Series]:
    """Return every series of a server, with those of one tenant."""

    async def series() -> list[Series]:
        server, model = ServerMetrics(RequestLimiter(1)), Metrics(EngineClient(Start(""), print, print))
        return [*server.series(), *model.series(), *tenant_series({"": TenantUsage()})]

    return asyncio.run(series())


def metrics_table() -> str:
    """Return one line per series: its name, labels, vLLM's name and help text."""
    lines = ["| series | labels | also as | what |", "|---|---|---|---|"]
    for row in all_series():
        ours = f"`{full_name(row.name, row.kind)}`" if row.name else ""
        vllm = ", ".join(f"`{full_name(name, row.kind)}`" for name in row.vllm_names)
        labels = ", ".join(f"`{label}`" for label in row.labels)
        what = f"{row.help} (histogram)" if row.kind == "histogram" else row.help
        lines.append(f"| {ours} | {labels} | {vllm} | {what} |")
    return "\n".join(lines) + "\n"


def aliases_table() -> str:
    """Return one line per deprecated name: the old and the new name."""
    lines = ["| old | new |", "|---|---|"]
    for row in all_series():
        for alias in row.aliases:
            lines.append(f"| `{full_name(alias, row.kind)}` | `{full_name(row.name, row.kind)}` |")
    lines.append('| `kvloom_tenant_bytes{state="held"}` | `kvloom_tenant_bytes{state="in_use"}` |')
    return "\n".join(lines) + "\n"


def main() -> int:
    text = FILE.read_text(encoding="utf-8")
    for name, table in zip(TABLES, (metrics_table(), aliases_table()), strict=True):
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        text = place.sub(lambda _, table=table: table, text)  # type: ignore[misc]
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
