"""Reads distributions from TOML or JSON, and refuses a wrong entry with its place.

```toml
[coder]
description = "Always a shell, one way to look things up"
all_of = ["terminal", "file"]                       # always
one_of = { web = 60, browser = 30, nothing = 10 }   # exactly one, by weight; a list of tables for several
toolsets = { vision = 20, "image_gen+web" = 10, "tool:process" = 50 }   # each rolls on its own, in percent
requires = { vision = ["browser"] }                 # a draw with vision has browser too
excludes = { browser = ["image_gen"] }              # and never these two
between = [2, 4]                                    # so many names in a draw

[ablation]
sets = { "terminal+file" = 50, "terminal" = 25, "file" = 25 }   # exactly one of these sets, by weight
```
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from gristmill.distribution_rules import NOTHING, TOOL_PREFIX, Distribution, split_names
from gristmill.errors import SetupError, UsageError

KEYS = ("description", "toolsets", "one_of", "all_of", "sets", "requires", "excludes", "between")

_MAX_WEIGHT = 1e9


def read_distributions(
    path: str | Path,
    *,
    toolsets: Collection[str] | None = None,
    tools: Collection[str] | None = None,
    used: str | None = None,
) -> dict[str, Distribution]:
    """The distributions of one file: JSON where its name ends in `.json`, else TOML.

    Args:
        path: the file.
        toolsets: the known names of toolsets; None takes any.
        tools: the known names of single tools; None takes any.
        used: the only distribution whose names must be known, since others may be for runs with other toolsets; None
            checks all.

    Raises:
        SetupError: the file cannot be read.
        UsageError: it is not TOML or JSON, or an entry is wrong; the message names the place.
    """
    found = {}
    for name, table in _load(Path(path)).items():
        known = (toolsets, tools) if used in (None, name) else (None, None)
        found[name] = _Reader(str(path), name, *known).read(table)
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
        data = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SetupError(f"Cannot read the distributions in {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{path} is not {kind}: {error}.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} must be one object that maps names to distributions.")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {key!r} occurs twice")
        data[key] = value
    return data


class _Reader:
    """Reads one distribution; knows where it stands, for the messages."""

    def __init__(self, path: str, name: str, toolsets: Collection[str] | None, tools: Collection[str] | None) -> None:
        self._path = path
        self._name = name
        self._toolsets = toolsets
        self._tools = tools

    def read(self, table: Any) -> Distribution:
        if not isinstance(table, dict):
            raise self._wrong("", "must be a table")
        for key in table:
            if key not in KEYS:
                raise self._wrong(key, "there is no such key", f"Known are {', '.join(KEYS)}.")
        description = table.get("description", "")
        if not isinstance(description, str):
            raise self._wrong("description", "must be text")
        if "sets" in table and not table.keys().isdisjoint(("toolsets", "one_of", "all_of")):
            raise self._wrong("sets", "says the whole draw, so toolsets, one_of and all_of cannot stand beside it")
        distribution = Distribution(
            name=self._name,
            description=description,
            entries=self._entries(table),
            one_of=self._one_of(table),
            requires=self._condition(table, "requires"),
            excludes=self._condition(table, "excludes"),
            between=self._between(table),
        )
        self._check(distribution)
        return distribution

    def _entries(self, table: dict[str, Any]) -> dict[str, float]:
        always = table.get("all_of", [])
        if not isinstance(always, list):
            raise self._wrong("all_of", "must be a list of names")
        given: list[tuple[str, str, float]] = [("all_of", name, 100) for name in always]
        for key, percent in self._table(table.get("toolsets", {}), "toolsets").items():
            given.append(("toolsets", key, self._number(f"toolsets.{key}", percent, 100, "a percentage")))
        entries: dict[str, float] = {}
        for where, key, percent in given:
            name = self._key(where, key)
            if name in entries:
                raise self._wrong(where, f"'{name}' is there twice")
            entries[name] = percent
        return entries

    def _one_of(self, table: dict[str, Any]) -> tuple[dict[str, float], ...]:
        where = "sets" if "sets" in table else "one_of"
        given = table.get(where, [])
        choices = given if isinstance(given, list) and where == "one_of" else [given]
        return tuple(self._weights(choice, where) for choice in choices)

    def _weights(self, value: Any, where: str) -> dict[str, float]:
        weights = {
            self._key(where, key, nothing=where == "one_of"): self._number(
                f"{where}.{key}", weight, _MAX_WEIGHT, "a weight"
            )
            for key, weight in self._table(value, where).items()
        }
        if not any(weights.values()):
            raise self._wrong(where, "needs a name with a weight over 0")
        return weights

    def _condition(self, table: dict[str, Any], where: str) -> dict[str, tuple[str, ...]]:
        condition: dict[str, tuple[str, ...]] = {}
        for name, others in self._table(table.get(where, {}), where).items():
            names = [others] if isinstance(others, str) else others
            if not isinstance(names, list) or not names:
                raise self._wrong(f"{where}.{name}", "must be a name or a list of names")
            condition[self._key(where, name)] = tuple(self._key(f"{where}.{name}", other) for other in names)
        return condition

    def _between(self, table: dict[str, Any]) -> tuple[int, int] | None:
        if "between" not in table:
            return None
        match table["between"]:
            case [int(low), int(high)] if 1 <= low <= high and bool not in (type(low), type(high)):
                return low, high
        raise self._wrong("between", "must be [n, m], whole numbers with 1 ≤ n ≤ m")

    def _check(self, distribution: Distribution) -> None:
        """What only the whole can say: there is something to draw, and the conditions can be met."""
        if not distribution.names:
            raise self._wrong("", "has nothing to draw", "Give it toolsets, one_of, all_of or sets.")
        for where, condition in (("requires", distribution.requires), ("excludes", distribution.excludes)):
            for name in _condition_names(condition):
                if name not in distribution.names:
                    raise self._wrong(where, f"names '{name}', which no entry draws")
        try:
            distribution.fallback  # noqa: B018  the first look works the probabilities out
        except ValueError as error:
            raise self._wrong("", str(error)) from None

    def _table(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(where, "must be a table")
        return value

    def _number(self, where: str, value: Any, most: float, what: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self._wrong(where, f"must be {what} from 0 to {most:g}, not {str(value)[:40]}")
        return value

    def _key(self, where: str, key: Any, *, nothing: bool = False) -> str:
        """An entry's names, checked, in plain form. Only the entries of `one_of` may say that they add nothing."""
        if not isinstance(key, str):
            raise self._wrong(where, f"must hold names, not {str(key)[:40]}")
        if nothing and key == NOTHING:
            return key
        for name in (part.strip() for part in key.split("+")):
            tool = name.removeprefix(TOOL_PREFIX) if name.startswith(TOOL_PREFIX) else None
            known = self._toolsets if tool is None else self._tools
            kind = "toolset" if tool is None else "tool"
            bare = name if tool is None else tool
            if not bare or bare == NOTHING:
                raise self._wrong(where, f"{key!r} is no name")
            if known is not None and bare not in known:
                raise self._wrong(where, f"there is no {kind} '{bare}'", f"Known are {', '.join(sorted(known))}.")
        return "+".join(split_names(key))

    def _wrong(self, where: str, problem: str, mend: str = "") -> UsageError:
        place = f", {where}" if where else ""
        return UsageError(f"{self._path}: distribution '{self._name}'{place}: {problem}.", mend)


def _condition_names(condition: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    return (name for pair in condition.items() for name in (pair[0], *pair[1]))
