"""The package's modules as syntax trees, read once, for the checks of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gristmill"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name below `gristmill`; an `__init__` by its folder's name, the package's by ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module of ours that a tree imports, also inside functions, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gristmill":
                    yield alias.name.removeprefix("gristmill").lstrip("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written out in full"
            if (node.module or "").split(".")[0] == "gristmill":
                base = (node.module or "").removeprefix("gristmill").lstrip(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    yield inner if inner in modules() else base, node.lineno


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
