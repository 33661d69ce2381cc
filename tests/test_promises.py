"""docs/promises.md: every promise names tests, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/promises.md").read_text()
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)")


def promises() -> list[str]:
    """List items and rows of tables, each as one line."""
    lines = re.sub(r"\n  +", " ", PAGE).splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| input")]
    return [line for line in lines if line.startswith("- ")] + rows


def test_promises_name_tests_that_exist() -> None:
    for promise in promises():
        links = LINK.findall(promise)
        assert links, f"no test holds {promise}"
        for words, path in links:
            name = "test_" + words.replace(" ", "_")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"


def test_all_of_the_page_was_read() -> None:
    assert sum(len(LINK.findall(promise)) for promise in promises()) == len(LINK.findall(PAGE)) > 100
