"""csrc/locks.h, Note [Locks] and the mutexes of csrc are one list."""

from __future__ import annotations

import re

import pytest

from tests.test_layering import ROOT, sources

NOTE = (
    (ROOT / "csrc/buckets/buckets.h").read_text().partition("// Note [Locks]\n")[2].partition("// clang-format on")[0]
)
HEADER = (ROOT / "csrc/locks.h").read_text()
MARKS = {"no": "", "yes": " (waits)", "in_the_end": " (waits in the end)"}


def ranks() -> list[str]:
    """The names in the enum, in order."""
    found = re.search(r"enum class LockRank : uint8_t \{\n(.*?)\};", HEADER, re.S)
    assert found is not None
    return re.findall(r"\w+", found[1])


def lines_of_header(text: str) -> list[list[str]]:
    """Locks by line, as the note has them."""
    lines: list[list[str]] = []
    for line, name, may_wait in re.findall(r'\{LockRank::\w+, (\d+), "(.+?)"(?:, MayWait::(\w+))?\}', text):
        assert int(line) in (len(lines) - 1, len(lines)), name
        if int(line) == len(lines):
            lines.append([])
        lines[-1].append(name + MARKS[may_wait or "no"])
    return lines


def lines_of_note(text: str) -> list[list[str]]:
    listed = text.partition("holds at most one of a line:\n//\n")[2].partition("//\n")[0]
    joined = re.sub(r";\n//     ", "; ", listed)
    return [line.removeprefix("//   ").split("; ") for line in joined.splitlines()]


def test_the_note_has_the_headers_order_and_waits() -> None:
    lines = lines_of_note(NOTE)
    assert sum(map(len, lines)) == len(ranks()) > 20
    assert lines == lines_of_header(HEADER)


def test_another_order_in_the_note_is_noticed() -> None:
    for old, new in [
        ("//   BeforeNext::mutex_\n//   Buckets::mutex\n", "//   Buckets::mutex\n//   BeforeNext::mutex_\n"),
        ("//   BeforeNext::mutex_\n", ""),
        ("Gather::mutex_ (waits)", "Gather::mutex_"),
        ("; Airborne::mutex_\n", "\n//   Airborne::mutex_\n"),
    ]:
        assert NOTE.count(old) == 1
        assert lines_of_note(NOTE.replace(old, new)) != lines_of_header(HEADER), old


def test_the_notes_tables_say_what_each_guards() -> None:
    tables = NOTE.partition("holds at most one of a line")[0]
    for name in [each.partition(" (")[0] for line in lines_of_header(HEADER) for each in line]:
        short = name if re.search(r"\w::mutex_?$", name) else name.split("::")[-1].removesuffix(" of a kernel")
        assert short in tables, name
    for guard in re.findall(r"\b\w+::\w*mutex_?\b", tables):
        assert guard in HEADER, guard


# What locks or makes threads wait. once_flag is a Gather's: the note says so.
PLAIN = re.compile(
    r"std::(?:(?:recursive_|shared_)?(?:timed_)?mutex|shared_timed_mutex|condition_variable(?:_any)?|latch|barrier|"
    r"(?:counting|binary)_semaphore|once_flag)\b|\bpthread_(?:mutex|rwlock|cond|spin)\w*_t\b"
)
ALLOWED = {
    "locks.h": {"std::mutex", "std::condition_variable", "std::condition_variable_any"},
    "gather.h": {"std::once_flag"},
}


def plain_in(text: str) -> set[str]:
    return set(PLAIN.findall(re.sub(r"//.*", "", text)))


def test_no_mutex_is_outside_the_list() -> None:
    found = {path.name: plain for path in sources() if (plain := plain_in(path.read_text()))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line", ["std::mutex m;", "static auto* const m = new std::shared_mutex;", "std::latch done{2};"]
)
def test_a_plain_mutex_is_noticed(line: str) -> None:
    assert plain_in(line)
    assert not plain_in(f"// {line}")


def test_each_rank_is_that_of_one_mutex() -> None:
    """Some mutexes' types are named more than once; the kernels' sums are guarded alike."""
    where: dict[str, list[str]] = {}
    for path in sources():
        text = path.read_text()
        for rank in re.findall(r"Mutex<LockRank::(\w+)>&? \w+(?:;|\(\) \{)|new Mutex<LockRank::(\w+)>;", text):
            where.setdefault(rank[0] or rank[1], []).append(path.as_posix())
    assert where.keys() == set(ranks())
    assert {rank for rank, files in where.items() if len({*files}) > 1} == {"sums"}
