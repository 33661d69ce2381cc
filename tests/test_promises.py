"""docs/promises.md: every promise names tests, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/promises.md").read_text()
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)")


def promises() -> list[str]:
    """List items and rows of tables, each as one line."""
    lines = re.sub(r"\n  +", " ", PAGE).splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| input")]
    return [line for line in lines if line.startswith("- ")] + rows


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[2:50])
def test_a_promise_names_tests_that_exist(promise: str) -> None:
    links = LINK.findall(promise)
    assert links, "no test holds it"
    for words, path in links:
        name = "test_" + words.replace(" ", "_")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"


def test_all_of_the_page_was_read() -> None:
    assert sum(len(LINK.findall(promise)) for promise in promises()) == len(LINK.findall(PAGE)) > 100
