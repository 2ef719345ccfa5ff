"""Write the table of metrics into docs/observability.md, from the rows that the server serves: `python tools/metrics_table.py`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from kvloom.serve.auth.limits import Gate
from kvloom.serve.metrics.metrics import Metrics
from kvloom.serve.metrics.series import Row, tenant_rows
from kvloom.serve.worker.engine_client import EngineLink
from kvloom.serve.worker.messages import Start, TenantUse

__all__ = ["FILE", "main", "table"]

FILE = Path(__file__).parent.parent / "docs" / "observability.md"
PLACE = re.compile(r"(?<=<!-- metrics -->\n).*?(?=<!-- /metrics -->)", re.DOTALL)


def table() -> str:
    """Every series, one line each: ours, the field's name for it, what it is."""

    async def rows() -> list[Row]:
        metrics = Metrics(EngineLink(Start(""), print, print), Gate(1))
        return [*metrics.rows(), *tenant_rows({"": TenantUse()})]

    lines = ["| series | labels | also as | what |", "|---|---|---|---|"]
    for row in asyncio.run(rows()):
        end = "_total" if row.kind == "counter" else ""
        ours = f"`{row.name}{end}`" if row.name else ""
        usual = ", ".join(f"`{name}{end}`" for name in row.usual)
        labels = ", ".join(f"`{label}`" for label in row.labels)
        what = f"{row.help} (histogram)" if row.kind == "histogram" else row.help
        lines.append(f"| {ours} | {labels} | {usual} | {what} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(PLACE.sub(lambda _: table(), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
