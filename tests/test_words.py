"""One concept, one word, and it is the field's: words that stood for it before don't come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What stood in code and prose up to the second storey of the house, and the field's term for it.
WORDS = {
    "settlement": "synchronizer",
    "settle": "sync, synchronize",
    "meeting": "sync point",
    "statement": "local status",
    "verdict": "reduced status (of ranks), ruling (on two options), conclusion (of a failure detector)",
    "outcome": "sync result",
    "remark": "piggyback",
    "whereabouts": "failure detector",
    "farewell": "failure record",
    "missed rank": "suspected rank",
    "is_straight": "is_zero_copy",
    "sent straight": "sent without a copy",
    "landed": "reduced",
    "landing": "reduction",
    "kExactWords": "kExactLimbs",
    "guest": "local optimizer",
    "trial": "probe",
    "team": "subgroup",
    "memory box": "control block",
}
# What users and their tools know by its name.
KEPT = ("with statement", "zerox land", "zerox::settle", 'range("settle")', "//   settle ")


def as_prose(text: str) -> str:
    """Names become the words that they are made of."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ").lower()


OLD = re.compile(rf"\b({'|'.join(map(as_prose, WORDS))})(?:s|d|ed|ing)?\b")


def old_words(text: str) -> set[str]:
    for kept in KEPT:
        text = text.replace(kept, "")
    return set(OLD.findall(as_prose(text)))


def test_an_old_word_is_noticed() -> None:
    assert old_words("auto& Settlement::finish") == {"settlement"}
    assert old_words("has_landed") == {"landed"}
    assert old_words("ranks settle, and `kExactWords`") == {"settle", "k exact words"}
    assert old_words("two teams") == {"team"}
    assert not old_words("for Python's with statement; zerox::settle")


SUFFIXES = (".md", ".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")


@pytest.mark.parametrize("folder", [".", "docs", "zerox", "csrc"])
def test_no_old_word_has_come_back(folder: str) -> None:
    paths = (ROOT / folder).glob("*.md" if folder == "." else "**/*")
    texts = {path.name: path.read_text() for path in paths if path.suffix in SUFFIXES}
    assert len(texts) > 2
    assert not {name: words for name, text in texts.items() if (words := old_words(text))}
