"""What a distribution is, and its exact probabilities.

A distribution is a list of rolls and of conditions. Each roll takes one of its choices, a choice being a set of names;
the draw is the union of what the rolls took. If that is nothing, the most probable entry is taken. A draw that breaks
a condition does not happen: the others keep their proportions, as if drawn again until all conditions hold.

Rolls that share a name, or that a condition binds, form a group, and the chances of all sets of a group are worked out
once. Groups are independent: one random number each decides a draw, and its probability is their product.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import fsum, prod
from random import Random
from typing import Any

NOTHING = "nothing"  # a choice of `one_of` that adds no name
TOOL_PREFIX = "tool:"  # marks the name of a single tool among those of toolsets
MAX_SETS = 65_536  # of one group

Names = frozenset[str]
Choices = Sequence[tuple[Names, float]]  # sets of names and their chances, which add up to 1


@dataclass(frozen=True)
class Distribution:
    """Which toolsets a session gets, with what chance.

    `entries` maps a name, or `a+b` for both at once, to a percentage; each rolls on its own. `one_of` maps names to
    weights; each of them gives exactly one of its choices. `requires` and `excludes` say what a draw with some name
    must have, or must not have; `between` how many names it has, at least and at most. A name is that of a toolset, or
    `tool:` and that of a tool. Nothing is checked here: see `distribution_file` for the rules of what users write.
    """

    name: str
    description: str
    entries: Mapping[str, float] = field(default_factory=dict)
    one_of: tuple[Mapping[str, float], ...] = ()
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    excludes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    between: tuple[int, int] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names that can be drawn, in the order of their first mention."""
        keys = [*self.entries, *(key for choice in self.one_of for key in choice)]
        return tuple(dict.fromkeys(name for key in keys for name in split_names(key)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The independent parts of the draw. Raises `ValueError` where no draw can meet the conditions."""
        parts: list[tuple[Names, list[Choices]]] = []
        bound = [(_names_of(roll), [roll]) for roll in self._rolls] + [(names, []) for names in self._bonds]
        for names, rolls in bound:
            if not names:  # a choice among nothing binds nothing
                continue
            joined = [part for part in parts if part[0] & names]
            parts = [part for part in parts if not part[0] & names]
            together = names.union(*(part[0] for part in joined))
            parts.append((together, [roll for part in joined for roll in part[1]] + rolls))
        return tuple(Group(names, self._table(rolls)) for names, rolls in parts)

    @cached_property
    def fallback(self) -> Names:
        """What is taken where nothing comes up: the most probable entry that meets the conditions, first on ties.

        Raises:
            ValueError: nothing can come up, and no single entry meets the conditions.
        """
        if not self._chance_of_nothing:
            return frozenset()
        choices = [choice for roll in self._rolls for choice in roll if choice[0] and self.allows(choice[0])]
        if not choices:
            raise ValueError("nothing can come up, and then no single entry meets the conditions")
        return max(choices, key=lambda choice: choice[1])[0]

    def draw(self, rng: Random) -> Names:
        """One set of names; takes one number per group from the generator."""
        drawn = frozenset[str]().union(*(group.draw(rng) for group in self.groups))
        return drawn or self.fallback

    def probability(self, names: Collection[str]) -> float:
        """The exact chance, 0 to 1, that a draw gives these names and no others."""
        drawn = frozenset(names)
        if not drawn or not drawn.issubset(self.names):
            return 0.0
        chance = prod(group.chance(drawn) for group in self.groups)
        return chance + self._chance_of_nothing if drawn == self.fallback else chance

    def chances(self) -> dict[str, float]:
        """The exact chance of each name to be in a draw, in percent, highest first."""
        chance = dict.fromkeys(self.names, 0.0)
        for group in self.groups:
            for drawn, share in group.table.items():
                for name in drawn:
                    chance[name] += 100 * share
        for name in self.fallback:
            chance[name] += 100 * self._chance_of_nothing
        return dict(sorted(chance.items(), key=lambda item: -item[1]))

    def allows(self, drawn: Names) -> bool:
        """True where a set of names meets all conditions."""
        return (
            all(drawn.issuperset(others) for name, others in self.requires.items() if name in drawn)
            and all(drawn.isdisjoint(others) for name, others in self.excludes.items() if name in drawn)
            and (self.between is None or self.between[0] <= len(drawn) <= self.between[1])
        )

    def plain(self) -> dict[str, Any]:
        """The distribution as data, in the form of a user's file."""
        data: dict[str, Any] = {"description": self.description, "toolsets": dict(self.entries)}
        if self.one_of:
            data["one_of"] = [dict(weights) for weights in self.one_of]
        for key, condition in (("requires", self.requires), ("excludes", self.excludes)):
            if condition:
                data[key] = {name: list(others) for name, others in condition.items()}
        if self.between:
            data["between"] = list(self.between)
        return data

    @property
    def _rolls(self) -> Iterator[Choices]:
        for key, percent in self.entries.items():
            yield [(frozenset(split_names(key)), percent / 100), (frozenset(), 1 - percent / 100)]
        for weights in self.one_of:
            total = fsum(weights.values())
            yield [(frozenset(split_names(key)), weight / total) for key, weight in weights.items()]

    @property
    def _bonds(self) -> Iterator[Names]:
        """The sets of names that a condition binds together."""
        for conditions in (self.requires, self.excludes):
            yield from (frozenset((name, *others)) & set(self.names) for name, others in conditions.items())
        if self.between:
            yield frozenset(self.names)

    @cached_property
    def _chance_of_nothing(self) -> float:
        return prod(group.chance(frozenset()) for group in self.groups)

    def _table(self, rolls: Sequence[Choices]) -> dict[Names, float]:
        table: dict[Names, float] = {frozenset(): 1.0}
        for roll in rolls:
            before, table = table, {}
            for drawn, chance in before.items():
                for names, share in roll:
                    if share > 0:
                        union = drawn | names
                        table[union] = table.get(union, 0.0) + chance * share
            if len(table) > MAX_SETS:
                raise ValueError(f"its entries that depend on each other make more than {MAX_SETS} sets")
        allowed = {drawn: chance for drawn, chance in table.items() if self.allows(drawn)}
        total = fsum(allowed.values())
        if not total:
            raise ValueError("no draw can meet its conditions")
        return {drawn: chance / total for drawn, chance in allowed.items()}


class Group:
    """The chances of all sets of names that one independent part of a distribution can give."""

    def __init__(self, names: Names, table: Mapping[Names, float]) -> None:
        self.table = table
        self._names = names
        self._sets = list(table)
        self._bounds = list(accumulate(table.values()))

    def draw(self, rng: Random) -> Names:
        """One of the sets."""
        # Rounding may leave the last bound a hair under 1.
        return self._sets[min(bisect(self._bounds, rng.random()), len(self._sets) - 1)]

    def chance(self, drawn: Names) -> float:
        """The chance that this part gives just its share of the names."""
        return self.table.get(drawn & self._names, 0.0)


def split_names(key: str) -> tuple[str, ...]:
    """The names of an entry: `a+b` has two, `nothing` has none."""
    return () if key == NOTHING else tuple(part.strip() for part in key.split("+"))


def _names_of(roll: Choices) -> Names:
    return frozenset[str]().union(*(names for names, _ in roll))
