"""Distributions: exact probabilities against an oracle, the draw, the grammar of users' files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import chain, combinations, product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.distribution import (
    BUILTIN,
    Distribution,
    UnknownDistribution,
    find_distribution,
    frequencies,
    load_distributions,
    render_distribution,
    render_list,
    sample,
    session_rng,
)
from gristmill.distribution_file import KEYS
from gristmill.errors import SetupError, UsageError

DOCS = Path(__file__).parents[2] / "docs" / "distributions.md"
TOOLSETS = ("web", "search", "vision", "image_gen", "terminal", "file", "browser")
TOOLS = ("terminal", "process", "read_file", "write_file", "patch", "search_files")


def subsets(names: tuple[str, ...]) -> list[frozenset[str]]:
    return [frozenset(c) for c in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))]


# Exact probabilities


@pytest.mark.parametrize("name", BUILTIN)
def test_the_probabilities_of_all_sets_add_up_to_one(name: str) -> None:
    distribution = BUILTIN[name]
    assert sum(distribution.probability(names) for names in subsets(distribution.names)) == pytest.approx(1, abs=1e-12)
    assert distribution.probability(()) == 0
    assert distribution.probability(("no_such_toolset", *distribution.names)) == 0


def test_probability_of_a_set_is_the_product_of_its_rolls() -> None:
    assert BUILTIN["research"].probability(("web", "vision")) == pytest.approx(0.9 * 0.3 * 0.5 * 0.9)
    assert BUILTIN["browser_tasks"].probability(("browser", "search")) == pytest.approx(
        0.97 * 0.88 * 0.85 + 0.03 * 0.88 * 0.85
    )
    assert BUILTIN["browser_tasks"].probability(("browser",)) == 0
    assert BUILTIN["default"].probability(BUILTIN["default"].names) == 1


def test_where_nothing_comes_up_the_most_probable_entry_is_taken_and_the_first_on_ties() -> None:
    tied = Distribution("d", "", {"a": 20, "b": 40, "c+d": 40})
    assert tied.fallback == {"b"}
    assert tied.probability(("b",)) == pytest.approx(0.8 * 0.4 * 0.6 + 0.8 * 0.6 * 0.6)
    never = Distribution("d", "", {"a": 0, "b": 0})
    assert sample(never, random.Random(1)).toolsets == ("a",)
    assert never.probability(("a",)) == 1
    conditioned = Distribution("d", "", {"a": 60, "b": 40, "c": 30}, requires={"a": ("b",)})
    assert conditioned.fallback == {"b"}


def oracle(distribution: Distribution) -> dict[frozenset[str], Fraction]:
    """All sets and their probabilities, by the plain reading: every combination of what the rolls can take."""
    rolls: list[list[tuple[frozenset[str], Fraction]]] = []
    for key, percent in distribution.entries.items():
        share = Fraction(percent) / 100
        rolls.append([(frozenset(key.split("+")), share), (frozenset(), 1 - share)])
    for weights in distribution.one_of:
        total = sum(map(Fraction, weights.values()))
        rolls.append(
            [(frozenset(() if k == "nothing" else k.split("+")), Fraction(w) / total) for k, w in weights.items()]
        )

    def allowed(names: frozenset[str]) -> bool:
        needs = all(set(others) <= names for name, others in distribution.requires.items() if name in names)
        bans = not any(set(others) & names for name, others in distribution.excludes.items() if name in names)
        low, high = distribution.between or (0, 99)
        return needs and bans and low <= len(names) <= high

    sets: dict[frozenset[str], Fraction] = Counter()  # type: ignore[assignment]
    for taken in product(*rolls):
        names = frozenset[str]().union(*(choice for choice, _ in taken))
        chance = Fraction(1)
        for _, share in taken:
            chance *= share
        if allowed(names):
            sets[names] += chance
    possible = sum(sets.values())
    nothing = sets.pop(frozenset(), Fraction(0))
    if nothing:
        entries = [choice for roll in rolls for choice in roll if choice[0] and allowed(choice[0])]
        best = max(share for _, share in entries)
        sets[next(names for names, share in entries if share == best)] += nothing
    return {names: chance / possible for names, chance in sets.items() if chance}


NAMES = st.sampled_from("abcde")
KEYS_OF_ENTRIES = st.lists(NAMES, min_size=1, max_size=3, unique=True).map("+".join)
CONDITIONS = st.dictionaries(NAMES, st.lists(NAMES, min_size=1, max_size=2).map(tuple), max_size=2)
DISTRIBUTIONS = st.builds(
    Distribution,
    name=st.just("d"),
    description=st.just(""),
    entries=st.dictionaries(KEYS_OF_ENTRIES, st.integers(0, 100), max_size=4),
    one_of=st.lists(
        st.dictionaries(KEYS_OF_ENTRIES | st.just("nothing"), st.integers(1, 9), min_size=1, max_size=3), max_size=2
    ).map(tuple),
    requires=CONDITIONS,
    excludes=CONDITIONS,
    between=st.none() | st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda pair: (pair[0], sum(pair))),
)


@settings(deadline=None, max_examples=300)
@given(DISTRIBUTIONS, st.integers(0, 2**64))
def test_probabilities_and_draws_are_those_of_the_plain_reading(distribution: Distribution, seed: int) -> None:
    try:
        expected = oracle(distribution)
    except (ValueError, ZeroDivisionError):
        expected = {}
    if not expected:
        with pytest.raises(ValueError, match=r"no draw can meet|no single entry meets"):
            distribution.fallback  # noqa: B018
        return
    for names in subsets(distribution.names):
        assert distribution.probability(names) == pytest.approx(float(expected.get(names, 0)), abs=1e-12)
    draw = sample(distribution, random.Random(seed))
    assert frozenset(draw.names) in expected
    assert draw.probability == distribution.probability(draw.names) > 0
    for name, chance in distribution.chances().items():
        assert chance == pytest.approx(float(100 * sum(p for names, p in expected.items() if name in names)), abs=1e-9)


# Draws


@pytest.mark.parametrize("name", BUILTIN)
def test_frequencies_are_those_that_the_table_says(name: str) -> None:
    draws = 4000
    exact = BUILTIN[name].chances()
    seen = frequencies(BUILTIN[name], draws, seed=7)
    assert seen.keys() == exact.keys()
    for toolset, percent in exact.items():
        share = min(percent / 100, 1.0)
        assert abs(seen[toolset] - percent) <= 500 * sqrt(share * (1 - share) / draws) + 1e-9, toolset


def test_every_entry_rolls_on_its_own_and_plus_rolls_once() -> None:
    draws = [set(sample(BUILTIN["balanced"], session_rng(3, str(i), 0)).toolsets) for i in range(4000)]
    both = sum({"web", "file"} <= drawn for drawn in draws) / len(draws)
    assert both == pytest.approx(0.25, abs=0.035)  # 5 sigma
    tasks = [set(sample(BUILTIN["browser_tasks"], session_rng(3, str(i), 0)).toolsets) for i in range(500)]
    assert all(("browser" in drawn) == ("search" in drawn) for drawn in tasks)


def test_one_of_takes_one_by_weight() -> None:
    distribution = Distribution("d", "", {}, one_of=({"web": 6, "browser+vision": 3, "nothing": 1}, {"file": 1}))
    draws = Counter(sample(distribution, session_rng(1, str(i), 0)).toolsets for i in range(4000))
    assert draws.keys() == {("web", "file"), ("browser", "vision", "file"), ("file",)}
    assert draws["web", "file"] / 4000 == pytest.approx(0.6, abs=0.04)
    assert draws["file",] / 4000 == pytest.approx(0.1, abs=0.025)


def test_a_draw_depends_on_seed_key_and_sample_alone() -> None:
    sessions = [(f"key{i}", number) for i in range(40) for number in range(2)]

    def draw_all(order: list[tuple[str, int]], seed: int = 5) -> dict[tuple[str, int], Any]:
        return {(key, number): sample(BUILTIN["science"], session_rng(seed, key, number)) for key, number in order}

    first = draw_all(sessions)
    assert draw_all(random.Random(0).sample(sessions, len(sessions))) == first
    assert {**draw_all(sessions[::2]), **draw_all(sessions[1::2])} == first
    assert draw_all(sessions, seed=6) != first
    assert any(first[key, 0] != first[key, 1] for key, _ in sessions)


def test_draws_are_fixed_for_ever() -> None:
    """A resume under another Python or on another machine draws what the first start drew."""
    code = (
        "from gristmill.distribution import *\n"
        "print([sample(BUILTIN['balanced'], session_rng(42, f'key{i}#2', i)).names for i in range(4)])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert printed == {
        "[('web', 'terminal'), ('web', 'terminal'), ('web', 'vision', 'image_gen', 'file', 'browser'),"
        " ('vision', 'image_gen')]"
    }


def test_single_tools_are_drawn_beside_toolsets() -> None:
    distribution = Distribution("d", "", {"web": 100, "tool:read_file+tool:patch": 100, "file": 0})
    draw = sample(distribution, random.Random(1))
    assert (draw.toolsets, draw.tools) == (("web",), ("read_file", "patch"))
    assert draw.names == ("web", "tool:read_file", "tool:patch")


def test_many_independent_entries_are_no_burden() -> None:
    distribution = Distribution("d", "", {f"tool:t{i}": 90 for i in range(200)})
    draw = sample(distribution, random.Random(1))
    assert 150 < len(draw.tools) < 200
    assert draw.probability == pytest.approx(0.9 ** len(draw.tools) * 0.1 ** (200 - len(draw.tools)))


# Files


def write(tmp_path: Path, text: str, name: str = "own.toml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_users_file_is_merged_over_the_built_in_ones(tmp_path: Path) -> None:
    path = write(tmp_path, '[mine]\ntoolsets = { web = 12.5, "file + terminal" = 100 }\n[minimal]\nall_of = ["file"]\n')
    merged = load_distributions(path, toolsets=TOOLSETS)
    assert list(merged) == [*BUILTIN, "mine"]
    assert merged["mine"] == Distribution("mine", "", {"web": 12.5, "file+terminal": 100})
    assert merged["minimal"].names == ("file",)
    assert merged["safe"] is BUILTIN["safe"]
    assert load_distributions(None) == dict(BUILTIN)


GRAMMAR = """
[all]
description = "Everything that the grammar has"
all_of = ["terminal"]
toolsets = { vision = 20, "tool:patch+tool:read_file" = 50 }
one_of = [{ web = 6, browser = 3, nothing = 1 }, { file = 1, search = 1 }]
requires = { vision = "browser" }
excludes = { search = ["web", "browser"] }
between = [2, 5]

[whole]
sets = { "terminal+file" = 2, terminal = 1 }
"""


def test_the_whole_grammar(tmp_path: Path) -> None:
    own = load_distributions(write(tmp_path, GRAMMAR), toolsets=TOOLSETS, tools=TOOLS)
    expected = Distribution(
        "all",
        "Everything that the grammar has",
        {"terminal": 100, "vision": 20, "tool:patch+tool:read_file": 50},
        one_of=({"web": 6, "browser": 3, "nothing": 1}, {"file": 1, "search": 1}),
        requires={"vision": ("browser",)},
        excludes={"search": ("web", "browser")},
        between=(2, 5),
    )
    assert own["all"] == expected
    assert own["whole"].one_of == ({"terminal+file": 2, "terminal": 1},)
    again = write(tmp_path, json.dumps({name: own[name].plain() for name in ("all", "whole")}), "again.json")
    assert load_distributions(again) == own


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("toolsets = { web = 120 }", "toolsets.web: must be a percentage from 0 to 100, not 120."),
        ("toolsets = { web = -1 }", "toolsets.web: must be a percentage from 0 to 100, not -1."),
        ("toolsets = { web = nan }", "toolsets.web: must be a percentage from 0 to 100, not nan."),
        ("toolsets = { web = true }", "toolsets.web: must be a percentage from 0 to 100, not True."),
        ("toolsets = { web = '50' }", "toolsets.web: must be a percentage from 0 to 100, not 50."),
        ("toolsets = { wbe = 5 }", "toolsets: there is no toolset 'wbe'. Known are browser, file,"),
        ("toolsets = { 'web+tool:cat' = 5 }", "toolsets: there is no tool 'cat'. Known are patch, process,"),
        ("toolsets = { 'web+' = 5 }", "toolsets: 'web+' is no name."),
        ("toolsets = { nothing = 5 }", "toolsets: 'nothing' is no name."),
        ("toolsets = { 'web+file' = 5, 'web + file' = 5 }", "toolsets: 'web+file' is there twice."),
        ("toolsets = ['web']", "toolsets: must be a table."),
        ("all_of = 'web'", "all_of: must be a list of names."),
        ("all_of = [1]", "all_of: must hold names, not 1."),
        ("all_of = ['web']\ntoolsets = { web = 5 }", "toolsets: 'web' is there twice."),
        ("one_of = { web = -1 }", "one_of.web: must be a weight from 0 to 1e+09, not -1."),
        ("one_of = [{ web = 0 }]", "one_of: needs a name with a weight over 0."),
        ("one_of = ['web']", "one_of: must be a table."),
        ("one_of = { nothing = 1 }", "has nothing to draw. Give it"),
        ("sets = { web = 1 }\nall_of = ['file']", "sets: says the whole draw, so toolsets, one_of and all_of cannot"),
        ("sets = { nothing = 1 }", "sets: 'nothing' is no name."),
        ("sets = [{ web = 1 }]", "sets: must be a table."),
        ("all_of = ['web']\nrequires = { web = [] }", "requires.web: must be a name or a list of names."),
        ("all_of = ['web']\nrequires = { web = 'file' }", "requires: names 'file', which no entry draws."),
        ("all_of = ['web']\nexcludes = { file = 'web' }", "excludes: names 'file', which no entry draws."),
        ("all_of = ['web', 'file']\nexcludes = { web = 'file' }", "no draw can meet its conditions."),
        ("all_of = ['web']\nbetween = [2, 3]", "no draw can meet its conditions."),
        ("all_of = ['web']\nbetween = [0, 3]", "between: must be [n, m], whole numbers with 1 ≤ n ≤ m."),
        ("all_of = ['web']\nbetween = [3, 2]", "between: must be [n, m], whole numbers with 1 ≤ n ≤ m."),
        ("all_of = ['web']\nbetween = [1, true]", "between: must be [n, m], whole numbers with 1 ≤ n ≤ m."),
        ("all_of = ['web']\nbetween = 2", "between: must be [n, m], whole numbers with 1 ≤ n ≤ m."),
        (
            "toolsets = { web = 50, file = 50 }\nrequires = { web = 'file', file = 'web' }",
            "nothing can come up, and then no single entry meets the conditions.",
        ),
        ("toolset = { web = 5 }", f"toolset: there is no such key. Known are {', '.join(KEYS)}."),
        ("description = 5", "description: must be text."),
        ("", "has nothing to draw. Give it toolsets, one_of, all_of or sets."),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(tmp_path: Path, entry: str, message: str) -> None:
    path = write(tmp_path, f"[mine]\n{entry}\n")
    with pytest.raises(UsageError) as caught:
        load_distributions(path, toolsets=TOOLSETS, tools=TOOLS)
    place, _, rest = str(caught.value).partition("distribution 'mine'")
    assert place == f"{path}: "
    assert rest.lstrip(",: ").startswith(message)


def test_too_many_dependent_sets_are_refused(tmp_path: Path) -> None:
    entries = ", ".join(f"t{i} = 50" for i in range(17))
    with pytest.raises(UsageError, match="make more than 65536 sets"):
        load_distributions(write(tmp_path, f"[mine]\ntoolsets = {{ {entries} }}\nbetween = [1, 3]\n"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.toml", "[mine\n", r"own\.toml is not TOML: .*line 1"),
        ("own.toml", "[mine]\n[mine]\n", r"own\.toml is not TOML: .*mine"),
        ("own.json", "{", r"own\.json is not JSON: .*line 1"),
        ("own.json", '{"mine": {}, "mine": {}}', r"own\.json is not JSON: the key 'mine' occurs twice"),
        ("own.json", "[]", r"own\.json must be one object"),
        ("own.json", "[" * 100_000, r"own\.json is not JSON"),
        ("own.json", '{"mine": 5}', r"distribution 'mine': must be a table"),
    ],
)
def test_a_file_that_is_no_file_of_distributions(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_distributions(write(tmp_path, text, name))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"Cannot read the distributions in .*none\.toml"):
        load_distributions(str(tmp_path / "none.toml"))


# What is printed


def test_the_list_is_by_name_and_each_by_probability() -> None:
    text = render_list(BUILTIN)
    blocks = text.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == sorted(BUILTIN)
    assert "\n  browser+search 97 %, terminal 15 %, vision 12 %" in text
    assert "  Only browser automation tools for pure web interaction tasks\n  browser 100 %" in text


def test_conditions_are_shown_too(tmp_path: Path) -> None:
    own = load_distributions(write(tmp_path, GRAMMAR))
    assert render_distribution(own["all"]).splitlines() == [
        "all",
        "  Everything that the grammar has",
        "  terminal 100 %, tool:patch+tool:read_file 50 %, vision 20 %",
        "  one of: web 60 %, browser 30 %, nothing 10 %",
        "  one of: file 50 %, search 50 %",
        "  vision requires browser",
        "  search excludes web, browser",
        "  between 2 and 5 of them",
    ]
    assert render_distribution(own["whole"]) == "whole\n  one of: terminal+file 66.67 %, terminal 33.33 %"


def test_an_unknown_distribution_lists_all(tmp_path: Path) -> None:
    known = load_distributions(write(tmp_path, GRAMMAR))
    with pytest.raises(UnknownDistribution, match="Unknown distribution: nope") as caught:
        find_distribution(known, "nope")
    assert all(name in caught.value.mend for name in known)


def test_the_examples_in_the_docs_are_right(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        own = load_distributions(write(tmp_path, block), toolsets=TOOLSETS, tools=TOOLS)
        assert len(own) > len(BUILTIN)
    for block in text.split("```python\n")[1:]:
        exec(block.split("```")[0], {})
