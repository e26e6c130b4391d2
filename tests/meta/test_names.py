"""The public names, the version, and what importing and asking for help cost."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

import gristmill
from support.source import PACKAGE, ROOT

# What only a run, or a part of one, needs.
HEAVY = ("aiohttp", "rich", "pyarrow", "numpy", "jsonschema_rs", "uvloop", "zstandard", "sqlite3", "playwright")


def test_public_names_are_sorted_and_there() -> None:
    assert gristmill.__all__ == sorted(gristmill.__all__)
    for name in gristmill.__all__:
        assert getattr(gristmill, name) is not None
    assert dir(gristmill) == gristmill.__all__
    with pytest.raises(AttributeError, match="nope"):
        _ = gristmill.nope


def test_what_type_checkers_see_is_what_is_given() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: str(node.module).removeprefix("gristmill.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == gristmill._PLACES
    assert {*seen, "__version__"} == set(gristmill.__all__)


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == gristmill.__version__
    assert f"## {gristmill.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def measured(code: str, times: int = 5) -> tuple[float, set[str]]:
    """The shortest CPU seconds of a piece of code in a fresh interpreter, and the modules that it imported."""
    program = (
        "import sys, time; before = time.process_time()\n"
        f"{code}\n"
        "print(time.process_time() - before, *sorted(sys.modules), file=sys.stderr)"
    )
    shortest, modules = 9.0, set[str]()
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, *names = done.stderr.split()
        shortest, modules = min(shortest, float(seconds)), set(names)
        if shortest < 0.01:
            break
    return shortest, modules


def test_importing_costs_nothing() -> None:
    seconds, modules = measured("import gristmill")
    assert seconds < 0.05
    assert not {name for name in modules if name.startswith("gristmill.")} and "click" not in modules


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["status", "--help"], ["--version"]])
def test_help_is_quick_and_imports_nothing_heavy(argv: list[str]) -> None:
    seconds, modules = measured(f"from gristmill.cli.main import main; main({argv!r})")
    assert seconds < 0.3
    assert not modules & set(HEAVY)
    assert not {name for name in modules if name.startswith(("gristmill.run", "gristmill.model", "gristmill.sandbox"))}


def test_a_run_imports_no_display_where_there_is_no_terminal() -> None:
    _, modules = measured("import gristmill.cli.run", times=1)
    assert not modules & {"rich", "pyarrow", "numpy", "playwright", "trafilatura", "PIL", "mcp"}
