"""Distributions of toolsets: the built-in ones, the user's, and the draw of a session.

The names of the last section are those that users of the reference import; the root's `toolset_distributions.py` gives
them under its module name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gristmill.distribution_file import read_distributions
from gristmill.distribution_rules import TOOL_PREFIX, Distribution
from gristmill.errors import UsageError

__all__ = [
    "BUILTIN",
    "DISTRIBUTIONS",
    "Distribution",
    "Draw",
    "UnknownDistribution",
    "find_distribution",
    "frequencies",
    "get_distribution",
    "list_distributions",
    "load_distributions",
    "render_distribution",
    "render_list",
    "sample",
    "sample_toolsets_from_distribution",
    "session_rng",
    "validate_distribution",
]

BUILTIN: Mapping[str, Distribution] = read_distributions(Path(__file__).parent / "data" / "distributions.toml")


class UnknownDistribution(UsageError, ValueError):
    """No distribution has this name; also a `ValueError`, as in the reference."""


@dataclass(frozen=True)
class Draw:
    """What one session is given: names of toolsets and of single tools, and the chance (0 to 1) of just this set."""

    toolsets: tuple[str, ...]
    probability: float
    tools: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Toolsets, then single tools with `tool:` before them."""
        return (*self.toolsets, *(TOOL_PREFIX + name for name in self.tools))


def sample(distribution: Distribution, rng: Random) -> Draw:
    """Draw the toolsets of one session."""
    drawn = distribution.draw(rng)
    names = [name for name in distribution.names if name in drawn]
    return Draw(
        toolsets=tuple(name for name in names if not name.startswith(TOOL_PREFIX)),
        probability=distribution.probability(drawn),
        tools=tuple(name.removeprefix(TOOL_PREFIX) for name in names if name.startswith(TOOL_PREFIX)),
    )


def session_rng(run_seed: int, task_key: str, sample: int) -> Random:
    """The generator of one session's draw, the same on every platform, whatever ran before and wherever it runs.

    Only `random()` may be taken from it: Python promises the same numbers for ever for that method alone.
    """
    digest = hashlib.blake2b(f"{run_seed} {task_key} {sample}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))


def load_distributions(
    path: str | None,
    *,
    toolsets: Collection[str] | None = None,
    tools: Collection[str] | None = None,
    used: str | None = None,
) -> dict[str, Distribution]:
    """The built-in distributions, and those of the user's file over them.

    Args:
        path: a TOML or JSON file; None for the built-in ones alone.
        toolsets: the known names of toolsets, which the file's must be among; None takes any.
        tools: the known names of single tools; None takes any.
        used: the only distribution of the file whose names must be known; None checks all.

    Raises:
        SetupError: the file cannot be read.
        UsageError: an entry of it is wrong; the message names the place.
    """
    own = read_distributions(path, toolsets=toolsets, tools=tools, used=used) if path else {}
    return {**BUILTIN, **own}


def find_distribution(distributions: Mapping[str, Distribution], name: str) -> Distribution:
    """The distribution of that name. Raises `UnknownDistribution`, which lists all names."""
    if name in distributions:
        return distributions[name]
    raise UnknownDistribution(f"Unknown distribution: {name}.", f"Available are {', '.join(sorted(distributions))}.")


def frequencies(distribution: Distribution, draws: int, seed: int) -> dict[str, float]:
    """How often each name came up in so many draws, in percent, highest first; `Distribution.chances` is exact."""
    counts = dict.fromkeys(distribution.names, 0)
    for number in range(draws):
        for name in distribution.draw(session_rng(seed, str(number), 0)):
            counts[name] += 1
    return {name: 100 * count / draws for name, count in sorted(counts.items(), key=lambda item: -item[1])}


def render_list(distributions: Mapping[str, Distribution]) -> str:
    """All distributions by name, for the console."""
    return "\n\n".join(render_distribution(distributions[name]) for name in sorted(distributions))


def render_distribution(distribution: Distribution) -> str:
    """One distribution for the console: description, then what it draws, the most probable first, then conditions."""
    lines = [distribution.name, f"  {distribution.description}"] if distribution.description else [distribution.name]
    if distribution.entries:
        lines.append(f"  {_ranked(distribution.entries)}")
    lines += [f"  one of: {_ranked(_percent(weights))}" for weights in distribution.one_of]
    lines += [f"  {name} requires {', '.join(others)}" for name, others in distribution.requires.items()]
    lines += [f"  {name} excludes {', '.join(others)}" for name, others in distribution.excludes.items()]
    if distribution.between:
        lines.append("  between {} and {} of them".format(*distribution.between))
    return "\n".join(lines)


def _percent(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {key: 100 * weight / total for key, weight in weights.items()}


def _ranked(percents: Mapping[str, float]) -> str:
    ranked = sorted(percents.items(), key=lambda item: -item[1])
    return ", ".join(f"{key} {percent:.4g} %" for key, percent in ranked)


# What users of the reference import

DISTRIBUTIONS: Mapping[str, dict[str, Any]] = {name: item.plain() for name, item in BUILTIN.items()}


def get_distribution(name: str) -> dict[str, Any] | None:
    """A built-in distribution as `{"description": …, "toolsets": {name: percent}}`, None where there is none."""
    return BUILTIN[name].plain() if name in BUILTIN else None


def list_distributions() -> dict[str, dict[str, Any]]:
    """A copy of all built-in distributions by name."""
    return {name: item.plain() for name, item in BUILTIN.items()}


def validate_distribution(name: str) -> bool:
    """Whether a built-in distribution has this name."""
    return name in BUILTIN


def sample_toolsets_from_distribution(name: str) -> list[str]:
    """One unseeded draw from a built-in distribution. Raises `UnknownDistribution`."""
    return list(sample(find_distribution(BUILTIN, name), Random()).toolsets)
