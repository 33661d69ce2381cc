"""Reads which attributes and methods the classes of csrc have, well enough to count them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NOT_COUNTED = re.compile(r"(using|friend|typedef|static_assert|enum)\b")


class Member(NamedTuple):
    """What stands between two semicolons, without what braces enclose: that is its ``body``."""

    text: str
    body: str
    is_public: bool

    @property
    def before_value(self) -> str:
        """Without template arguments and an initial value."""
        text, count = self.text, 1
        while count:
            text, count = re.subn(r"<[^<>()]*(\([^()]*\)[^<>()]*)*>", "", text)
        return re.split(r"(?<![=!<>+-])=(?!=)|\{\}", re.sub(r"^template\s*", "", text).replace("operator=", ""))[
            0
        ].strip()

    @property
    def function(self) -> str | None:
        """Its name, if it is one: not of a constructor or a destructor."""
        found = re.search(r"(~?\w+|operator\W+|operator\(\))\s*\(", self.before_value)
        is_type = re.match(r"(class|struct|union)\b[^(]*$", self.before_value)
        if found is None or is_type or NOT_COUNTED.match(self.text) or re.search(r"=\s*(delete|default)$", self.text):
            return None
        return found.group(1)

    @property
    def attribute(self) -> str | None:
        found = re.search(r"[\w>&*\]]\s*[\s&*](\w+)\s*(\[.*\])?(:\s*\d+)?$", " " + self.before_value)
        is_static = re.match(r"(inline |constexpr )*static\b|constexpr\b", self.text)
        if found is None or is_static or NOT_COUNTED.match(self.text) or self.function or self.type_of_body:
            return None
        return found.group(1)

    @property
    def type_of_body(self) -> str | None:
        """``struct { int a; } name`` is "name", and so is ``struct Name { int a; }``: then it declares only a type."""
        return self.text if re.match(r"(class|struct|union)\b.*\{\}", self.text, re.S) else None

    @property
    def one_call(self) -> bool:
        return is_one_call(self.body)


def is_one_call(body: str) -> bool:
    called = r"[\w:]+((\.|->)\w+|\[[^\]]*\]|\(\))*(<[^<>]*>)?"
    return re.fullmatch(rf"\s*(return\s+)?{called}\([^;{{}}]*\)\s*;\s*", body) is not None


@dataclass
class CppClass:
    name: str
    bases: list[str]
    members: list[Member] = field(default_factory=list)
    inner: dict[str, CppClass] = field(default_factory=dict)

    def attributes(self, known: dict[str, CppClass]) -> list[str]:
        """Those of bases and of structs that it has as members count as its own."""
        found = []
        for base in self.bases:
            if base in known and known[base] is not self:
                found += known[base].attributes(known)
        for member in self.members:
            if member.type_of_body and (named := re.search(r"\{\}\s*(\w+)", member.text)):
                inner = class_of(named[1], [], member.body, is_public=True)
                found += [f"{named[1]}.{each}" for each in inner.attributes(known)]
            elif name := member.attribute:
                of_type = self.inner.get(member.before_value.removeprefix("const ").split()[0])
                found += [f"{name}.{each}" for each in of_type.attributes(known)] if of_type else [name]
        return found

    def methods(self, one_calls: set[str]) -> set[str]:
        """Beside those that are public and one call of something else: here, or among ``one_calls``, by Class::name."""
        found = set()
        for member in self.members:
            name = member.function
            if name is None or name.lstrip("~") == self.name:
                continue
            hands_over = member.one_call if member.body else f"{self.name}::{name}" in one_calls
            if not (member.is_public and hands_over):
                found.add(name)
        return found


def class_of(name: str, bases: list[str], body: str, is_public: bool) -> CppClass:
    made = CppClass(name, bases, list(members_of(body, is_public)))
    for each in made.members:
        declared = re.match(r"(class|struct)\s+(\w+)\b([^;{]*)\{\}", each.text)
        if declared:
            inner = class_of(declared[2], bases_in(declared[3]), each.body, declared[1] == "struct")
            made.inner[inner.name] = inner
    return made


def bases_in(text: str) -> list[str]:
    words = re.findall(r"[\w:]+", re.sub(r"<[^<>]*>", "", text.partition(":")[2]))
    return [each.split("::")[-1] for each in words if each not in ("public", "protected", "private", "virtual")]


def members_of(body: str, is_public: bool) -> Iterator[Member]:
    depth, text, inner = 0, "", ""
    for char in body:
        if depth == 0 and char == ":" and text.strip() in ("public", "protected", "private"):
            is_public, text = text.strip() == "public", ""
            continue
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth > 0 and not (depth == 1 and char == "{"):
            inner += char
            continue
        text += char
        made = Member(text.strip().rstrip(";").strip(), inner.strip(), is_public)
        if char == ";" or (char == "}" and made.function):
            # What follows a brace in a constructor's list of initial values is no member.
            if made.text and made.text[0] not in ",{":
                yield made
            text = inner = ""


def classes_in(texts: Iterable[str]) -> dict[str, CppClass]:
    """All classes by name, also those inside others, as Outer::Inner."""
    found: dict[str, CppClass] = {}

    def add(path: str, each: CppClass) -> None:
        found[path] = each
        for inner in each.inner.values():
            add(f"{path}::{inner.name}", inner)

    for text in texts:
        text = re.sub(r"//.*|^\s*#.*", "", text, flags=re.M)
        at = 0
        while match := re.compile(r"(?<!enum )(?<![<,])(?<!, )\b(class|struct)\s+(\w+)\b([^;{}()=]*)\{").search(
            text, at
        ):
            depth, at = 1, match.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                at += 1
            body = text[match.end() : at - 1]
            add(match[2], class_of(match[2], bases_in(match[3].replace("final", "")), body, match[1] == "struct"))
    return found


def one_calls_in(texts: Iterable[str]) -> set[str]:
    """Functions that are defined outside their class, as Class::name, and are one call."""
    found = set()
    for text in texts:
        for match in re.finditer(r"^[\w:<>&*, ]*?\b(\w+::~?\w+)\([^;{}]*\{([^{}]*)\}", text, re.M):
            if is_one_call(match[2]):
                found.add(match[1])
    return found
