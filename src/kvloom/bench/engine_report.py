"""The report of `kvloom bench engine`: rows of plain data, ratios, and three tables of at most 120 columns.

This module measures nothing. It contains figures of other runs, which the report labels as quoted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine_runners import Measurement, Turns
from .roofline import LowerBound
from .workloads import Workload

__all__ = ["QUOTED", "QUOTED_AS", "RunnerResult", "WorkloadResult", "render", "rows_of"]

QUOTED_AS = "vLLM 0.24.0, quoted"
QUOTED: dict[str, dict[str, float]] = {
    "llama-3.1-8b": {
        "W1": 7.04, "W2": 16.54, "W3": 6.30, "W3 warm": 5.82, "W4": 9.43, "W5": 1.28, "W6": 9.32, "start": 151,
    },
    "llama-3.2-1b": {
        "W1": 2.41, "W2": 3.30, "W3": 2.13, "W3 warm": 1.96, "W4": 1.92, "W5": 0.34, "W6": 2.15, "start": 30,
    },
    "gemma-3-12b": {
        "W1": 14.44, "W2": 30.18, "W3": 9.41, "W3 warm": 9.53, "W4": 11.47, "W5": 2.14, "W6": 14.49, "start": 82,
    },
}  # fmt: skip
"""Seconds that vLLM 0.24.0 took for each workload on an H200, in an earlier measurement. Also its seconds from start to
ready, with cold compile caches.

vLLM ran with its defaults, prefix caching, bf16 and random weights. Each figure is the better of two runs, one with one
process and one with two processes.
"""
GOAL_WASTE = 0.04
"""Goal for the wasted share of the pages in use, for workloads of full size. In scaled workloads, sequences are
shorter, so their partial last blocks are a larger share."""


@dataclass(slots=True)
class WorkloadResult:
    """Result of one workload on one runner.

    - `best` is the fastest round, and `rounds` are the seconds of each round.
    - `first_answers` are the answers of the first round.
    - `prompts` is the time of the prompts alone in seconds, if it was measured.
    - `processor` is the smallest CPU time of a round in seconds, or None on a GPU.
    """

    work: Workload
    best: Measurement
    rounds: list[float]
    first_answers: Turns
    prompts: float | None = None
    processor: float | None = None

    @property
    def seconds(self) -> float:
        return self.best.seconds

    def figures(self, least: LowerBound | None = None) -> dict[str, float]:
        """Return all figures by name. `least` is the lower bound of the workload's time, if known."""
        found = {"seconds": self.seconds, "output_tokens_s": self.work.output_tokens / self.seconds}
        if self.prompts is not None:
            found["prefill_s"] = self.prompts
            found["prefill_tokens_s"] = self.work.requests * self.work.prompt / self.prompts
            if least is not None:
                found["prefill_tflops"] = least.prefill_flops / self.prompts / 1e12
        first = self.best.figures.get("first_token_s")
        if first is not None and least is not None and self.work.output > 1:
            found["decode_tb_s"] = least.decode_bytes / (self.seconds - first) / 1e12
        if self.processor is not None:
            found["processor_s"] = self.processor
        return found | self.best.figures


@dataclass(slots=True)
class RunnerResult:
    """One runner (kvloom or another engine), and its results by the name of the workload. `start_s` is the time in
    seconds until it was ready. `error` is the error that ended the runner, or None."""

    name: str
    version: str = ""
    start_s: float | None = None
    notes: dict[str, str] = field(default_factory=dict)
    results: dict[str, WorkloadResult] = field(default_factory=dict)
    error: str | None = None


def same_answers(ours: Turns, theirs: Turns) -> float:
    """Return the share of conversations with equal answers."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def rows_of(
    works: Sequence[Workload],
    ran: Sequence[RunnerResult],
    floors: dict[str, LowerBound],
    quoted: dict[str, float],
    exact: bool,
) -> list[dict[str, Any]]:
    """Return one dictionary per workload. `floors` has the lower bound of each workload, and `quoted` the seconds of
    other runs. If `exact` is False, the answers of the runners are not compared, because rounding can change them."""
    rows = []
    own = next((each.results for each in ran if each.name == "kvloom"), {})
    for work in works:
        least, mine = floors.get(work.name), own.get(work.name)
        row: dict[str, Any] = {
            "work": work.name,
            "what": work.what,
            "size": work.size,
            "runs": {},
            "ratios": {},
            "processor_ratios": {},
        }
        if least is not None:
            row["floor_s"] = least.seconds
            row["floor"] = {"prefill_s": least.prefill, "decode_s": least.decode}
        for each in ran:
            result = each.results.get(work.name)
            if result is None:
                continue
            row["runs"][each.name] = {**result.figures(least), "rounds_s": result.rounds}
            if mine is not None and each.name != "kvloom":
                row["ratios"][each.name] = result.seconds / mine.seconds
                if result.processor and mine.processor:
                    row["processor_ratios"][each.name] = result.processor / mine.processor
                if exact:
                    row["runs"][each.name]["same_answers"] = same_answers(
                        mine.first_answers, result.first_answers
                    )
        if work.name in quoted:
            row["quoted_s"] = quoted[work.name]
        if mine is not None:
            if least is not None:
                row["ratios"]["over the floor"] = mine.seconds / least.seconds
            if work.name in quoted:
                row["ratios"][QUOTED_AS] = quoted[work.name] / mine.seconds
        rows.append(row)
    return rows


def render(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in (_times(report), *_details(report)):
        console.print(table)
        console.print()
    for name, each in report["runners"].items():
        if each["start_s"] is not None:
            notes = "".join(f", {key} {value}" for key, value in each["notes"].items())
            console.print(f"{name} {each['version']}: {each['start_s']:.1f} s from start to ready{notes}")
        if each["error"]:
            console.print(f"{name}: {each['error']}", markup=False)
    if report["quoted_start_s"] is not None:
        console.print(
            f"{QUOTED_AS}: {report['quoted_start_s']:.0f} s from start to ready; {report['quoted_note']}"
        )
    console.print(report["method"])


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("work", "size", "on") else "right", overflow="fold"
        )
    return table


def _times(report: dict[str, Any]) -> Any:
    names = [name for name in report["runners"] if any(name in row["runs"] for row in report["rows"])]
    floor = any("floor_s" in row for row in report["rows"])
    quoted = any("quoted_s" in row for row in report["rows"])
    columns = ["work", "size", *(["floor"] if floor else []), *names, *([QUOTED_AS] if quoted else [])]
    columns += ["over the floor"] if floor else []
    columns += [f"{name} / kvloom" for name in names if name != "kvloom"]
    columns += [f"{QUOTED_AS} / kvloom"] if quoted else []
    table = _table(f"Seconds, {report['shape']} on {report['device']}", *columns)
    for row in report["rows"]:
        cells = [f"{row['work']} {row['what']}", row["size"]]
        cells += [_number(row.get("floor_s"), 3)] if floor else []
        cells += [_number(row["runs"].get(name, {}).get("seconds"), 3) for name in names]
        cells += [_number(row.get("quoted_s"), 2)] if quoted else []
        asked = (["over the floor"] if floor else []) + [name for name in names if name != "kvloom"]
        cells += [_number(row["ratios"].get(name), 2) for name in [*asked, *([QUOTED_AS] if quoted else [])]]
        table.add_row(*cells)
    return table


def _details(report: dict[str, Any]) -> list[Any]:
    """Return the tables of details, one for speed and one for the cache.

    A blank cell was not measured. A column without figures is left out."""
    speed: list[list[str]] = []
    cache: list[list[str]] = []
    for row in report["rows"]:
        for name, seen in row["runs"].items():
            waste = seen.get("waste")
            much = waste is not None and waste > GOAL_WASTE and report["scale"] == 1
            wasted = "" if waste is None else f"{'[red]' if much else ''}{waste:.2%}"
            speed.append([
                row["work"], name, _number(seen["output_tokens_s"]), _number(seen.get("prefill_tokens_s")),
                _number(seen.get("prefill_tflops")), _number(seen.get("first_token_s"), 3),
                _number(seen.get("decode_tb_s"), 2), _number(seen.get("processor_s"), 3),
                _number(row["processor_ratios"].get(name), 2),
            ])  # fmt: skip
            cache.append([
                row["work"], name, _number(seen.get("peak_running")), _share(seen.get("hit_rate")), wasted,
                _share(seen.get("pool_waste")), _number(seen.get("preemptions")), _share(seen.get("same_answers")),
            ])  # fmt: skip
    speed_columns = (
        "work", "on", "output tokens/s", "prefill tokens/s", "TFLOP/s", "first token s", "decode TB/s", "processor s",
        "/ kvloom",
    )  # fmt: skip
    cache_columns = (
        "work",
        "on",
        "peak running",
        "hit rate",
        "waste",
        "of the pool",
        "preempted",
        "same answers",
    )
    return [_filled("Speed", speed_columns, speed), _filled("Cache", cache_columns, cache)]


def _filled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Return a table without empty columns."""
    used = [place for place, _ in enumerate(columns) if any(row[place] for row in rows)]
    table = _table(title, *(columns[place] for place in used))
    for row in rows:
        table.add_row(*(row[place] for place in used))
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
