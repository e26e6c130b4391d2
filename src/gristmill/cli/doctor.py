"""`gristmill doctor`: what this machine can do, and how to mend what it cannot."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from gristmill import __version__, plugins
from gristmill.cli.console import Lines
from gristmill.config import KEY_VARIABLES, keys_present, sandbox_from_environment, tool_settings
from gristmill.errors import GristmillError
from gristmill.model import embedded
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP

_LOW_DISK = 2 * 1024**3  # bytes
_FEW_FILES = 4096  # open files; a session in flight needs about a dozen


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `ok` None: nothing is wrong, it is merely not there."""

    group: str
    name: str
    ok: bool | None
    detail: str


def examine(output_dir: str) -> Iterator[Finding]:
    """Look at everything a run may need."""
    yield Finding(group="gristmill", name="version", ok=True, detail=__version__)
    python = f"{platform.python_version()} on {platform.system()} {platform.release()}, {os.cpu_count()} cores"
    yield Finding(group="gristmill", name="python", ok=True, detail=python)
    yield from _resources(output_dir)
    for name in plugins.names("sandboxes"):
        yield _finding("sandboxes", name, _sandbox_problem(name))
    yield _finding("models", "local (embedded)", embedded.problem())
    present = keys_present()
    for host, variable in KEY_VARIABLES.items():
        found = present[variable]
        yield Finding(
            group="models", name=host, ok=found or None, detail="key is set" if found else f"no key: set {variable}"
        )
    settings = tool_settings()
    there = plugins.names("toolsets")
    for name in there:
        yield _finding("toolsets", name, _toolset_problem(name, settings))
    for name in dict.fromkeys(TOOL_TO_TOOLSET_MAP.values()):
        if name not in there:
            yield Finding(group="toolsets", name=name, ok=None, detail="not in this version")


def doctor(output_dir: str, as_json: bool) -> int:
    """Print all findings."""
    lines = Lines(sys.stdout)
    findings = list(examine(output_dir))
    if as_json:
        lines.document([msgspec.to_builtins(finding) for finding in findings])
        return 0
    for group, of_group in groupby(findings, lambda finding: finding.group):
        lines.write(group.capitalize())
        for finding in of_group:
            sign = {True: "✅", False: "❌", None: "–"}[finding.ok]
            lines.write(f"   {sign} {finding.name}: {finding.detail}")
    return 0


def _finding(group: str, name: str, problem: str) -> Finding:
    return Finding(group=group, name=name, ok=not problem, detail=problem or "works")


def _resources(output_dir: str) -> Iterator[Finding]:
    for name, path in (("disk of the output", Path(output_dir)), ("disk of sandboxes", Path(tempfile.gettempdir()))):
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free
        yield Finding(
            group="machine", name=name, ok=free > _LOW_DISK, detail=f"{free / 1024**3:.1f} GiB free at {there}"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    detail = f"{soft} may be open" + (f"; for many sessions at once: ulimit -n {_FEW_FILES}" if few else "")
    yield Finding(group="machine", name="files", ok=not few, detail=detail)


def _sandbox_problem(name: str) -> str:
    try:
        return str(plugins.find("sandboxes", name).problem(sandbox_from_environment(kind=name).options))
    except GristmillError as error:
        return str(error)


def _toolset_problem(name: str, settings: dict[str, str]) -> str:
    try:
        return str(plugins.find("toolsets", name).missing(settings))
    except GristmillError as error:
        return str(error)
