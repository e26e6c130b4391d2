"""`gristmill doctor`: what this machine can do, and how to mend what it cannot."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import msgspec

from gristmill import __version__, plugins
from gristmill.cli.console import Lines
from gristmill.config import KEY_VARIABLES, host_of, keys_present, sandbox_from_environment, tool_settings
from gristmill.distribution import BUILTIN
from gristmill.errors import GristmillError
from gristmill.model import embedded
from gristmill.offer import ask_mcp_servers
from gristmill.sandbox.limits import limits_held
from gristmill.tools.browsing.chromium import find_executable
from gristmill.tools.image_gen import choose_artist
from gristmill.tools.web import choose_provider

_LOW_DISK = 2 * 1024**3  # bytes
_FEW_FILES = 4096  # open files; a session in flight needs about a dozen


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `ok` None: nothing is wrong, it is merely not there."""

    group: str
    name: str
    ok: bool | None
    detail: str


def examine(output_dir: str, mcp_config: str | None = None) -> Iterator[Finding]:
    """Look at everything a run may need. Raises `UsageError` for an MCP file that is wrong."""
    yield Finding(group="gristmill", name="version", ok=True, detail=__version__)
    python = f"{platform.python_version()} on {platform.system()} {platform.release()}, {os.cpu_count()} cores"
    yield Finding(group="gristmill", name="python", ok=True, detail=python)
    yield from _resources(output_dir)
    for name in plugins.names("sandboxes"):
        yield _finding("sandboxes", name, _sandbox_problem(name))
    held, not_held = limits_held()
    detail = f"held: {', '.join(held)}" + (f"; not {', '.join(not_held)}: no cgroups can be made" if not_held else "")
    yield Finding(group="sandboxes", name="limits of local", ok=None if not_held else True, detail=detail)
    yield _finding("models", "local (embedded)", embedded.problem())
    present = keys_present()
    for host, variable in KEY_VARIABLES.items():
        found = present[variable]
        yield Finding(
            group="models", name=host, ok=found or None, detail="key is set" if found else f"no key: set {variable}"
        )
    yield from _toolsets(mcp_config)


def doctor(output_dir: str, mcp_config: str | None, as_json: bool) -> int:
    """Print all findings. Raises `UsageError` for an MCP file that is wrong."""
    lines = Lines(sys.stdout)
    findings = list(examine(output_dir, mcp_config))
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


def _toolsets(mcp_config: str | None) -> Iterator[Finding]:
    settings = tool_settings()
    problems = {name: _toolset_problem(name, settings) for name in plugins.names("toolsets")}
    for name, problem in problems.items():
        how = "" if problem or name not in _HOW else f": {_HOW[name](settings)}"
        yield Finding(group="toolsets", name=name, ok=not problem, detail=problem or f"works{how}")
    if servers := asyncio.run(ask_mcp_servers(mcp_config)):
        for server in servers.config.servers:
            problem = servers.discovery.problems.get(server.name, "")
            tools = ", ".join(tool.name for tool in servers.discovery.tools[server.name])
            yield Finding(group="toolsets", name=server.name, ok=not problem, detail=problem or f"works: {tools}")
    for works, name in ((True, "can run"), (False, "lack a toolset")):
        found = [d.name for d in BUILTIN.values() if works is not any(problems[toolset] for toolset in d.names)]
        if found:
            yield Finding(group="distributions", name=name, ok=works or None, detail=", ".join(sorted(found)))


def _toolset_problem(name: str, settings: Mapping[str, str]) -> str:
    try:
        return str(plugins.find("toolsets", name).missing(settings))
    except GristmillError as error:
        return str(error)


def _who_looks(settings: Mapping[str, str]) -> str:
    model, base = settings.get("VISION_MODEL"), settings.get("VISION_BASE_URL")
    if not model:
        return "the run's own model looks, where it can; else set VISION_MODEL"
    return f"{model} at {host_of(base) if base else 'the endpoint of the run'}"


def _who_draws(settings: Mapping[str, str]) -> str:
    artist = choose_artist(settings)
    return f"{artist.model} at {host_of(artist.base_url)}" if artist else ""


def _who_searches(settings: Mapping[str, str]) -> str:
    return f"searches with {choose_provider(settings).name}"


# How a toolset that works will do so.
_HOW: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "web": _who_searches,
    "search": _who_searches,
    "vision": _who_looks,
    "image_gen": _who_draws,
    "browser": find_executable,
}
