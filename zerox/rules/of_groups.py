"""Which rule updates the parameters of which param group: the group's own, or that of the optimizer's class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerox.rules.rule import Rule

RULE = "rule"  # the option of a param group that names one
# What a group with a rule of its own takes from the constructor. Its other options have that rule's defaults: the same
# word need not mean the same (weight_decay), and good values differ (betas).
FROM_CONSTRUCTOR = ("lr", "maximize")


@dataclass(frozen=True)
class Rules:
    """``default``: of groups that name none. ``known``: those that a group may name, by their names."""

    default: Rule
    known: Mapping[str, Rule]

    def of(self, group: Mapping[str, Any]) -> Rule:
        """Raises ValueError for a rule that is not known."""
        name = group.get(RULE, self.default.name)
        if name not in self.known:
            raise ValueError(f"zerox: {RULE} must be one of {sorted(self.known)}, got {name!r}")
        return self.known[name]

    def have_owners(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether parameters of any may lie whole on one rank."""
        return any(self.of(group).has_owners for group in groups)

    def others_options(self, rule: Rule) -> set[str]:
        """Options that only other rules have."""
        return {option for each in self.known.values() for option in each.defaults} - rule.defaults.keys()

    def complete(self, group: dict[str, Any], where: str, constructor: Mapping[str, Any]) -> None:
        """Before torch adds the ``constructor``'s defaults: gives the group those of a rule of its own.

        Raises ValueError for an option that its rule does not have.
        """
        rule = self.of(group)
        if foreign := [option for option in group if option in self.others_options(rule)]:
            raise ValueError(
                f"{where} has {foreign[0]}={group[foreign[0]]!r}, and its rule {rule.name!r} has no such option: it "
                f"has {', '.join(rule.defaults)}"
            )
        if rule is not self.default:
            if unknown := [o for o in FROM_CONSTRUCTOR if constructor.get(o) is True and o not in rule.defaults]:
                raise ValueError(
                    f"{where} has the rule {rule.name!r}, which has no {unknown[0]}, and would not follow the "
                    f"constructor's {unknown[0]}=True: give it an optimizer of its own"
                )
            for option, value in rule.defaults.items():
                group.setdefault(option, constructor.get(option, value) if option in FROM_CONSTRUCTOR else value)

    def clear_options(self, group: dict[str, Any]) -> None:
        """After torch added the constructor's defaults: takes away those that the group's rule does not have."""
        for option in self.others_options(self.of(group)):
            group.pop(option, None)

    def defaults_of(self, group: Mapping[str, Any], constructor: Mapping[str, Any]) -> Mapping[str, Any]:
        rule = self.of(group)
        return constructor if rule is self.default else rule.defaults

    def of_saved(self, group: Mapping[str, Any]) -> Rule | None:
        """The rule of a group that was saved, by zerox or by torch, whose groups name none; None: of none of these."""
        fits = [rule for rule in self.known.values() if not self.misfit({RULE: rule.name}, group)]
        return fits[0] if len(fits) == 1 else None

    def misfit(self, live: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
        """Why a ``saved`` group can't become the ``live`` one; empty if it can. Groups of torch name no rule."""
        rule = self.of(live)
        named = saved.get(RULE, rule.name)
        # Schedulers write momentum into all groups, also those of rules that have none, which say what they are.
        foreign = sorted(self.others_options(rule) & saved.keys()) if RULE not in saved else []
        missing = [option for option in rule.needed_options if option not in saved]
        if named != rule.name:
            return f"has the rule {rule.name!r}, and was saved with the rule {named!r}"
        if foreign or missing:
            why = f"{foreign[0]}, which this rule does not have" if foreign else f"no {missing[0]}"
            return f"has the rule {rule.name!r}, and was saved by another optimizer, with {why}"
        return ""
