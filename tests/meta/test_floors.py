"""Who may import whom: every module stands on one floor and imports only what lies below it."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from support.source import imports, modules

# The first match wins. A folder's port is lower than its adapters.
FLOORS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (0, ("errors", "types", "config", "data")),
    (
        1,
        (
            "task",
            "prompt",
            "dataset",
            "distribution_rules",
            "distribution_file",
            "distribution",
            "conversation",
            "trajectory",
            "row_summary",
            "stats",
            "events",
        ),
    ),
    # Ports, and what stands beside them without knowing any adapter.
    (
        2,
        (
            "model.base",
            "sandbox.base",
            "sandbox.lazy",
            "tools.base",
            "tools.builtin",
            "tools.arguments",
            "tools.text",
            "tools.toolbox",
            "quality.base",
            "export.base",
        ),
    ),
    (3, ("model", "sandbox", "tools", "quality", "export")),
    (4, ("session",)),
    (5, ("run",)),
    (6, ("build", "offer", "plugins", "testing")),
    (7, ("cli", "report", "viewer")),
    (8, ("__main__",)),
)
ROOM = {name: floor for floor, names in FLOORS for name in names}


def floor_of(module: str) -> int:
    """The floor of a module by the longest name in the table that it begins with."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in ROOM:
            return ROOM[name]
    raise AssertionError(f"{module} stands on no floor: give it one in {__file__}")


def folder_of(module: str) -> str:
    return module.partition(".")[0] if "." in module or module in FOLDERS else ""


FOLDERS = {name.partition(".")[0] for name in modules() if "." in name}
NAMES = [name for name in modules() if name]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_lower_floors_or_its_own_folder(name: str) -> None:
    floor, folder = floor_of(name), folder_of(name)
    wrong = []
    for target, line in imports(modules()[name]):
        if not target:  # the package itself: its version
            continue
        below = floor_of(target)
        same = below == floor and (folder_of(target) == folder or floor <= 2)
        skips = floor in (4, 5) and below == 3
        if (below > floor or (below == floor and not same) or skips) and (name, target) not in ALLOWED:
            wrong.append(f"line {line}: {target} (floor {below}) from floor {floor}")
    assert not wrong, f"{name}: " + "; ".join(wrong)


# Edges that the rule forbids and that stand for a reason.
ALLOWED: dict[tuple[str, str], str] = {}


def test_no_cycles() -> None:
    graph = {name: {t for t, _ in imports(tree) if t and t != name} for name, tree in modules().items() if name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


# Imports inside functions: each module that has one, with its reason.
INSIDE = {
    "build": "uvloop is not on every platform",
    "model.embedded": "the extra `local`, in the child that serves the model",
    "model.pricing": "the extra `prices`",
    "tools.browser": "the extra `browser`",
    "tools.mcp": "the extra `mcp`",
    "plugins": "parts are imported when they are asked for",
    "tools.extract": "the extra `web`, in the child that reads documents",
    "tools.providers.ddgs": "the extra `web`",
    "tools.vision": "the extra `vision`",
}


def test_imports_inside_functions_have_a_reason() -> None:
    found = set()
    for name, tree in modules().items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        found.add(name)
    assert found <= set(INSIDE), f"imports inside functions without a reason: {sorted(found - set(INSIDE))}"


def test_the_check_sees_imports_in_functions_and_cycles() -> None:
    tree = ast.parse("def f():\n    from gristmill.run import runner\n    import gristmill.cli.main\n")
    assert [target for target, _ in imports(tree)] in (["run.runner", "cli.main"], ["run", "cli.main"])
    assert floor_of("sandbox.base") == 2 and floor_of("sandbox.host") == 3
