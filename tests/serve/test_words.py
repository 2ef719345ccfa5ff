"""One table of words: miss reasons and tier outcomes are the same in the core, the docs, the page and the terminal."""

from __future__ import annotations

import re
from pathlib import Path

from kvloom.core import MISS_REASONS
from kvloom.serve.dashboard import page_files
from kvloom.serve.words import OUTCOMES, fault_text, tier_word
from kvloom.serve.worker.cache_snapshot import _faults
from kvloom.serve.worker.messages import TierUsage
from kvloom.tiers import Outcome

DOCS = (Path(__file__).parent.parent.parent / "docs" / "observability.md").read_text(encoding="utf-8")


def documented(head: str) -> list[str]:
    """The first column of a table of the page."""
    table = DOCS.partition(f"| {head} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)


def test_the_documented_words_are_those_of_the_tables() -> None:
    assert documented("miss reason") == [reason.replace(" ", "_") for reason in MISS_REASONS]
    assert documented("outcome") == list(OUTCOMES)


def test_every_outcome_of_a_tier_has_a_word() -> None:
    assert set(OUTCOMES) == {outcome.name.lower() for outcome in Outcome} - {"pending"}


def test_the_page_has_no_words_of_its_own_for_reasons_and_outcomes() -> None:
    several = [reason for reason in MISS_REASONS if " " in reason]
    text = b"".join(content for name, content in page_files().items() if name.endswith(".js")).decode()
    assert [word for word in (*several, "corrupt", "untrusted") if re.search(rf"\b{word}\b", text)] == []


def test_faults_are_counted_by_outcome_over_reads_and_writes() -> None:
    use = TierUsage("disk", reads={"ok": 5, "missing": 4, "late": 40}, writes={"ok": 2, "late": 1, "full": 3})
    assert fault_text(_faults(use)) == "41 late, 3 full"
    assert (tier_word("device"), tier_word("disk")) == ("pool", "disk")
