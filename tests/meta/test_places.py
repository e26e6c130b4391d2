"""One place for each thing: the environment, spawning, printing; and no file that grows without a reason."""

from __future__ import annotations

import ast

import pytest

from support.source import PACKAGE, ROOT, dotted, modules

LONGEST = 400
LONGER: dict[str, str] = {}  # file → why it is longer

ENVIRONMENT = {
    "config": "the one reader",
    "build": "handed on whole to worker processes",
    "model.embedded": "handed on whole to the model's server",
}
SPAWNING = {
    "sandbox.process": "the one spawner of sandboxes",
    "run.processes": "worker processes",
    "tools.extract_pool": "readers of documents, which hostile ones may end",
    "model.embedded": "the server of the embedded model",
}
PRINTING = {
    "testing.endpoint": "a program of its own, which prints its address",
    "model.embedded": "the server's process, which tells its address",
}
SPAWNERS = ("subprocess.", "asyncio.create_subprocess", "os.fork", "os.spawn", "os.posix_spawn", "os.exec", "pty.")
BAD_NAMES = ("util", "utils", "helper", "helpers", "common", "manager", "handler", "misc")


def uses(name: str, prefixes: tuple[str, ...]) -> list[int]:
    """Lines of a module that use a dotted name which begins so."""
    return [
        node.lineno
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node).startswith(prefixes)
    ]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_and_well_named(path) -> None:
    name = str(path.relative_to(PACKAGE))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST or name in LONGER, f"{name} has {lines} lines"
    assert not set(path.stem.split("_")) & set(BAD_NAMES)


@pytest.mark.parametrize("name", [n for n in modules() if n not in ENVIRONMENT])
def test_only_config_reads_the_environment(name: str) -> None:
    assert not uses(name, ("os.environ", "os.getenv", "os.putenv"))


@pytest.mark.parametrize("name", [n for n in modules() if n not in SPAWNING])
def test_only_named_places_spawn(name: str) -> None:
    spawning = uses(name, SPAWNERS)
    assert not [line for line in spawning if not _only_a_name(name, line)], f"{name} spawns"


def _only_a_name(name: str, line: int) -> bool:
    """Constants and exceptions of subprocess do not spawn."""
    harmless = ("subprocess.PIPE", "subprocess.DEVNULL", "subprocess.STDOUT", "subprocess.Timeout", "subprocess.Called")
    return line in uses(name, harmless)


@pytest.mark.parametrize("name", [n for n in modules() if not n.startswith("cli") and n not in PRINTING])
def test_only_the_command_line_prints(name: str) -> None:
    calls = [n for n in ast.walk(modules()[name]) if isinstance(n, ast.Call) and dotted(n.func) == "print"]
    assert not calls and not uses(name, ("sys.stdout", "sys.stderr"))


def test_exceptions_are_still_needed() -> None:
    for name in LONGER:
        assert len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) > LONGEST
    for table, prefixes in ((SPAWNING, SPAWNERS), (ENVIRONMENT, ("os.environ",))):
        for name in table:
            assert uses(name, prefixes), f"{name} needs no exception"


# Hosts of package registries and paths of one machine; put together here so that this file does not hold them.
_HALVES = ("pypi.|org", "python|hosted", "npm|js.", "deb.|debian", "bash_|jobs", "/wo|rk/", "../sha|red")
FORBIDDEN = tuple(word.replace("|", "") for word in _HALVES)


def test_no_file_names_a_registry_or_a_machine() -> None:
    skipped = {".git", ".venv", "data", "__pycache__", "build", "dist"}
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or skipped & set(parts) or any(p.endswith("_cache") or p == ".hypothesis" for p in parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert not [word for word in FORBIDDEN if word in text], f"{path.relative_to(ROOT)} names {word_in(text)}"


def word_in(text: str) -> str:
    return next(word for word in FORBIDDEN if word in text)
