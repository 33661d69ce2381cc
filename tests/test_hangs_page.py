"""docs/hangs.md says what a rank that waits says, and calls threads and places as the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/hangs.md").read_text()
SOURCES = "".join(
    path.read_text()
    for folder in ("zerox", "csrc")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".cpp", ".h")
)

SAYS = """
from datetime import timedelta
from zerox import _C as C
C.say_wait(
    rank=0,
    doing="zerox.save()",
    whom="rank 1, last seen in step() of step 41",
    waited=timedelta(seconds=60),
    timeout=timedelta(seconds=1800),
)
"""


def test_the_line_on_the_page_is_the_one_that_a_rank_says() -> None:
    code = f"import zerox\n{SAYS}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stderr.splitlines() if "has waited" in line]
    assert f"\n{line}\n" in PAGE


def test_every_place_on_the_page_is_one_that_the_code_names() -> None:
    places = re.search(r"^\| `in \.\.\.` \| what is missing \|\n(.*?)\n\n", PAGE, re.S | re.M)
    assert places
    names = [name for row in places[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(names) > 10, "the table was not found"
    for name in names:
        for part in filter(None, (part.removeprefix("for ").strip() for part in re.split(r"\.\.\.|\[|\]", name))):
            words = re.sub(r" (bucket|table)$|^the exchange of (?=the (updated|mean))", "", part)
            assert words.removesuffix(" of") in SOURCES, f"nothing says {words!r}"


def test_every_thread_that_has_a_name_is_on_the_page() -> None:
    names = set(re.findall(r'"(zerox (?:pack|land|gather|ahead|shards|state|linger))"', SOURCES))
    assert len(names) == 7, "they were not recognised"
    for name in names:
        assert f"`{name}`" in PAGE
    described = set(re.findall(r'(?:Worker \w+\{|pthread_setname_np\(pthread_self\(\), |::kKind, )"([^"]+)"', SOURCES))
    assert described == names, "a thread has a name that the page does not have"


def test_readme_and_limits_lead_to_the_page() -> None:
    assert "(docs/hangs.md)" in (ROOT / "README.md").read_text()
    assert "(hangs.md)" in (ROOT / "docs/limits.md").read_text()
