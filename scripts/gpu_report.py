"""What gpu.py reads out of the programs that it runs, and the two files that it writes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASSED, FAILED, TIMED_OUT, INTERRUPTED = "passed", "FAILED", "TIMED OUT", "INTERRUPTED"
NOT_RUN, NOT_AVAILABLE, NOT_SUPPORTED = "not run", "not available", "not supported here"
BAD = (FAILED, TIMED_OUT, INTERRUPTED)

Part = dict[str, Any]  # outcome and seconds, and what else the part has to say

# ---- reading

PROGRESS = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
STARTED = re.compile(r"^(\S+\.py::.+)$")
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - (.*))?$")
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+?(?::\d+)?: (.*)$")


def read_pytest(text: str) -> Part:
    """Counts, names of failures with their first line, reasons of skips, from the output of ``pytest -v -ra``.

    Of a run that was killed it finds what was done until then, and the test in which it ended.
    """
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    skips: Counter[str] = Counter()
    unfinished = None
    for line in text.splitlines():
        if match := PROGRESS.match(line):
            # A test that passed and whose teardown fails has two lines; the worse counts.
            if outcomes.get(match[1]) not in ("FAILED", "ERROR"):
                outcomes[match[1]] = match[2]
            unfinished = None
        elif match := REASON.match(line):
            reasons[match[1]] = match[2] or ""
            outcomes.setdefault(match[1], "ERROR")  # a file that could not be collected
        elif match := SKIPPED.match(line):
            skips[match[2]] += int(match[1])
        elif match := STARTED.match(line):
            unfinished = match[1].strip()
    counts: Counter[str] = Counter(outcomes.values())
    failures = {name: reasons.get(name, "") for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")}
    return {
        "counts": {outcome.lower(): counts[outcome] for outcome in sorted(counts)},
        "failures": failures,
        "skips": dict(skips),
        "unfinished": unfinished,
    }


ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?", re.MULTILINE)
HAZARDS = re.compile(
    r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", re.MULTILINE
)
UNSUPPORTED = re.compile(r"^=+ .*(?:not supported|unsupported).*$", re.MULTILINE | re.IGNORECASE)
MOST_LINES = 40


def read_sanitizer(text: str) -> Part:
    """The summary of compute-sanitizer, the first lines of what it found, and whether it can work here at all."""
    said = [line for line in text.splitlines() if line.startswith("=========")]
    if found := HAZARDS.search(text):
        errors: int | None = int(found[1])  # warnings too: within a warp a race is no more than one
        summary = f"{found[1]} hazards, {found[2]} errors, {found[3]} warnings"
    elif found := ERRORS.search(text):
        errors, summary = int(found[1]), f"{found[1]} errors"
    else:
        errors, summary = None, "no summary"
    unsupported = UNSUPPORTED.search(text)
    return {
        "errors": errors,
        "summary": summary,
        "unsupported": unsupported[0].strip("= ") if unsupported else None,
        "findings": said[:MOST_LINES] if errors else [],
    }


# ---- writing


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(folder: Path, stem: str, result: Part) -> list[Path]:
    """``stem``.json with everything and ``stem``.md for people; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    for path, text in zip(paths, (json.dumps(result, indent=1) + "\n", as_markdown(result)), strict=True):
        partial = path.with_name(path.name + ".part")
        partial.write_text(text)
        partial.replace(path)
    return paths


def as_markdown(result: Part) -> str:
    parts: dict[str, Part] = result["parts"]
    lines = [f"# {result['facts'].get('device', 'GPU')}, {result['date']}", ""]
    lines += table(("", ""), [(name.replace("_", " "), value) for name, value in result["facts"].items()])
    rows = [(name, part["outcome"], f"{part['seconds']:.0f}", says(part)) for name, part in parts.items()]
    lines += table(("part", "outcome", "s", "what it says"), rows)
    for name, part in parts.items():
        lines += [f"- **{name}** {test}: {why}" for test, why in part.get("failures", {}).items()]
        lines += [f"- **{name}** ended in {test}" for test in part.get("unfinished_tests", [])]
        lines += [f"- {name} skipped {count}: {why}" for why, count in part.get("skips", {}).items()]
        for tool, run in part.get("tools", {}).items():
            lines += [f"- {tool}: {run['outcome']}, {run['summary']}"]
            lines += ["", "```", *run["findings"], "```", ""] if run["findings"] else []
    for name, part in parts.items():
        if part.get("said"):
            lines += ["", f"## {name}", "", "```", f"$ {part.get('command', '')}".rstrip(), *part["said"], "```"]
        if part.get("picture"):
            lines += ["", f"![{name}]({part['picture']})"]
    return "\n".join(lines).rstrip() + "\n"


def table(header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    return [_line(header), "|" + "---|" * len(header), *(_line(row) for row in rows), ""]


def _line(cells: tuple[object, ...]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def says(part: Part) -> str:
    """In a line: its note, counts of its tests, outcomes of its tools."""
    said = [part["note"]] if part.get("note") else []
    said += [", ".join(f"{count} {outcome}" for outcome, count in part.get("counts", {}).items())]
    said += [f"{tool} {run['outcome']}" for tool, run in part.get("tools", {}).items()]
    return ", ".join(filter(None, said))
