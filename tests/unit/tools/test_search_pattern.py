"""One dialect of patterns: ripgrep and grep find the same lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tools.search_pattern import expand_braces, glob_to_posix, read_pattern

LINES = [
    "",
    "alpha beta",
    "Alpha_1 = 42",
    "  def f(x): {",
    "interface{} | []",
    "a.b-c^d]e[f\\g",
    "naïve café",
    "tab\there",
    "x{2} $HOME ~/&& -- #",
    "say \"hi\" and 'bye'",
    "aaa bbb 123",
    "foo<bar>(baz)",
]
ENV = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
needs_ripgrep = pytest.mark.skipif(shutil.which("rg") is None, reason="ripgrep is not installed")


def found(*command: str) -> list[str]:
    done = subprocess.run(command, input="\n".join(LINES).encode() + b"\n", capture_output=True, env=ENV, timeout=20)
    assert done.returncode in (0, 1), done.stderr
    return [line.decode() for line in done.stdout.splitlines()]


def both(text: str) -> tuple[list[str], list[str]]:
    pattern = read_pattern(text)
    assert pattern.posix is not None
    case = ("-i",) if pattern.ignore_case else ()
    return found("rg", "--no-config", "-aN", "-e", pattern.rust), found("grep", "-aE", *case, "-e", pattern.posix)


@needs_ripgrep
@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (r"\d+", [2, 8, 10]),
        (r"\bdef\b", [3]),
        (r"^\s+\w", [3]),
        (r"[\w.]+-c", [5]),
        (r"[]^-]", [4, 5, 8]),
        (r"[^\x00-\x7f]", [6]),
        (r"caf.$", [6]),
        (r"interface{}", [4]),
        (r"x\{2\}", [8]),
        (r"a{3}", [10]),
        (r"a{2,}?\s", [10]),
        (r"(?:alpha|beta) ?", [1]),
        (r"(?i)alpha", [1, 2]),
        (r"(?P<word>foo)<", [11]),
        (r"\t", [7]),
        (r"\x22hi\"", [9]),
        (r"\u00e9", [6]),
        (r"\$HOME \~\/", [8]),
        (r"[\]\[]", [4, 5]),
        (r"[\\]g", [5]),
        (r"[+\-*/^]c", [5]),
        (r"\D\S\W", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (r"^$", [0]),
        (r"\Aalpha|here\z", [1, 7]),
        (r"[[:digit:]]{2}", [2, 10]),
        (r".*?bar", [11]),
        (r"^[^\n]o", [11]),
        (r"^[^\nf]aa", [10]),
    ],
)
def test_both_programs_find_the_lines(text: str, numbers: list[int]) -> None:
    wanted = [LINES[number] for number in numbers]
    assert both(text) == (wanted, wanted)


members = st.sampled_from(
    ["a", "b-d", "0-9", r"\d", r"\w", r"\s", r"\]", r"\[", r"\\", r"\-", "^", ".", "$", "é", r"\t"]
)
classes = st.tuples(st.sampled_from(["", "^"]), st.lists(members, min_size=1, max_size=4)).map(
    lambda pair: f"[{pair[0]}{''.join(pair[1])}]"
)
atoms = (
    st.sampled_from(["a", "b", "f", " ", ".", r"\d", r"\w", r"\s", r"\b", r"\.", r"\{", "{", "}", r"\-", "é", r"\W"])
    | classes
)
counts = st.sampled_from(["", "", "", "*", "+", "?", "*?", "{1,2}", "{2}"])
pieces = st.tuples(atoms, counts).map(lambda pair: pair[0] + (pair[1] if pair[0] != r"\b" else ""))
patterns = st.recursive(
    st.lists(pieces, min_size=1, max_size=4).map("".join),
    lambda inner: st.tuples(st.sampled_from(["({}|{})", "(?:{}){}", "{}{}"]), inner, inner).map(
        lambda parts: parts[0].format(parts[1], parts[2])
    ),
    max_leaves=3,
)


@needs_ripgrep
@given(patterns)
@settings(max_examples=150, deadline=None)
def test_whatever_the_pattern_both_find_the_same(text: str) -> None:
    try:
        ripgrep, grep = both(text)
    except ValueError:  # a class such as "[^]" has no end
        return
    assert ripgrep == grep


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"(?=x)", "Look-around"),
        (r"(?<!x)y", "Look-around"),
        (r"(a)\1", "Back-references"),
        ("a\nb", "one line"),
        (r"a\nb", "one line"),
        (r"[\n]", "one line"),
        (r"\q", "no meaning"),
        ("[abc", "'\\[' without"),
        ("abc\\", "single backslash"),
        (r"\u{110000}", "no character"),
        (r"\x00", "NUL"),
    ],
)
def test_what_the_dialect_lacks_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_pattern(text)


@pytest.mark.parametrize("text", [r"\p{Greek}", r"[a-z&&[^b]]", r"(?s:a)", r"[\W]"])
def test_what_only_ripgrep_can_say(text: str) -> None:
    pattern = read_pattern(text)
    assert pattern.posix is None
    assert pattern.rust == text


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_pattern_raises_anything_else(text: str) -> None:
    try:
        read_pattern(text)
    except ValueError as error:
        assert str(error).endswith(".")


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("*.py", ["a.py"], ["a.pyc", "b/a.py"]),
        ("**/*.py", ["a.py", "b/a.py", "b/c/a.py"], ["a.txt"]),
        ("src/**/*.ts", ["src/a.ts", "src/b/c/a.ts"], ["lib/src/a.ts", "src/a.tsx"]),
        ("src/**", ["src/a", "src/b/c"], ["src"]),
        ("[ab]?.t", ["a1.t", "bx.t"], ["c1.t", "a.t"]),
        ("[!a]", ["b"], ["a"]),
        ("a+(1).py", ["a+(1).py"], ["aa1.py"]),
    ],
)
def test_globs(glob: str, yes: list[str], no: list[str]) -> None:
    pattern = re.compile(glob_to_posix(glob))
    assert all(pattern.fullmatch(path) for path in yes)
    assert not any(pattern.fullmatch(path) for path in no)


def test_braces() -> None:
    assert expand_braces("*.{ts,tsx}") == ["*.ts", "*.tsx"]
    assert expand_braces("{a,b}{1,2}") == ["a1", "a2", "b1", "b2"]
    assert expand_braces("{a}") == ["{a}"]
    assert len(expand_braces("{a,b}" * 12)) == 64
