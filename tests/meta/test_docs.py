"""What the documents say is true: commands, flags, targets, links and extras that they name exist."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from itertools import groupby
from pathlib import Path

import click
import pytest

import gristmill
from gristmill.cli.flags import BY_NAME, FLAGS
from gristmill.cli.main import GROUP
from support.source import ROOT, modules

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_lines(text: str) -> list[str]:
    """The commands of all bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def commands() -> list[tuple[Path, str]]:
    found = [(path, line) for path in DOCUMENTS for line in shell_lines(path.read_text(encoding="utf-8"))]
    inline = [
        (path, command)
        for path in DOCUMENTS
        for command in re.findall(r"`((?:gristmill|make|python batch_runner\.py)(?: [^`]*)?)`", path.read_text("utf-8"))
    ]
    return found + inline


@pytest.mark.parametrize(("path", "line"), commands(), ids=lambda v: v.name if isinstance(v, Path) else v[:50])
def test_a_command_of_the_documents_exists(path: Path, line: str) -> None:
    words = shlex.split(line.partition(" #")[0].partition(" > ")[0].replace("[", "").replace("]", ""))
    match words:
        case ["make"]:
            pass
        case ["make", target, *_]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["gristmill", "run", *flags] | ["python", "batch_runner.py", *flags]:
            check_flags(flags, set(BY_NAME))
            check_files(flags)
        case ["gristmill", name, *rest]:
            if not name.startswith("-"):
                assert name in GROUP.commands, f"{path.name}: gristmill {name}"
                known = {opt.lstrip("-") for p in GROUP.commands[name].params for opt in p.opts if opt.startswith("--")}
                check_flags(rest, known | {"help"})
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case ["pip", "install", *what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for extra in re.findall(r"\.?\[([a-z,]+)\]", line):
                assert set(extra.split(",")) <= set(extras), f"{path.name}: {line}"
            assert what
        case _:
            assert words[0] in ("export", "echo", "python", "gristmill", "git", "cd", "pip", "apt-get", "ulimit", "uv")


GROUPS = {f"gristmill.{kind}" for kind in ("sandboxes", "toolsets", "filters", "exporters", "models")}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_names_of_the_package_that_are_spoken_of_exist(path: Path) -> None:
    for name in set(re.findall(r"\bgristmill(?:\.\w+)+", path.read_text(encoding="utf-8"))) - GROUPS:
        parts = name.split(".")[1:]
        found: object = gristmill
        for length, part in enumerate(parts, 1):
            if ".".join(parts[:length]) in modules():
                found = importlib.import_module(".".join(["gristmill", *parts[:length]]))
            else:
                found = getattr(found, part)


def check_flags(words: list[str], known: set[str]) -> None:
    for word in words:
        if word.startswith("--"):
            assert word[2:].partition("=")[0].replace("-", "_") in known | {"json", "help"}, word


def check_files(words: list[str]) -> None:
    for word in words:
        if word.startswith("--dataset_file=examples/"):
            assert (ROOT / word.partition("=")[2]).is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_flags_that_are_spoken_of_exist(path: Path) -> None:
    others = {o.lstrip("-") for c in GROUP.commands.values() for p in c.params for o in p.opts if o.startswith("--")}
    foreign = {"no_deps", "ulimit", "port", "script", "help", "version", "prompts", "turns", "workers", "latency"}
    foreign |= {"user", "scope"}  # of systemd-run
    for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", path.read_text(encoding="utf-8")):
        assert name.replace("-", "_") in {*BY_NAME, *others} | foreign, f"{path.name}: --{name}"


def test_the_readme_lists_every_flag_as_it_is() -> None:
    rows = []
    for group, flags in groupby(FLAGS, lambda flag: flag.group):
        rows.append(f"| **{group}** | | |")
        for flag in flags:
            default = "required" if flag.required else flag.shown_default or "–"
            rows.append(f"| `--{flag.name}` | {default} | {flag.help} |")
    assert "\n".join(rows) in README, "write the table of flags anew:\n" + "\n".join(rows)


def test_the_readme_names_every_command_and_document() -> None:
    for name in GROUP.commands:
        assert f"gristmill {name}" in README
    for path in (ROOT / "docs").glob("*.md"):
        assert f"docs/{path.name}" in README, f"the README does not lead to docs/{path.name}"


def test_every_flag_and_command_says_what_it_is_for() -> None:
    for flag in FLAGS:
        assert flag.help and not flag.help.endswith(".") and len(flag.help) < 100
    for command in GROUP.commands.values():
        assert isinstance(command, click.Command) and command.help
