"""Which toolsets a run can offer: built-in ones, those of plug-ins, the user's own functions, and MCP servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gristmill import plugins
from gristmill.config import RunConfig
from gristmill.distribution_rules import TOOL_PREFIX, Distribution
from gristmill.errors import SetupError, UsageError
from gristmill.task import Dataset
from gristmill.tools.base import Toolset
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from gristmill.tools.functions import toolset_from
from gristmill.tools.mcp import Discovery, discover, mcp_toolsets
from gristmill.tools.mcp_config import McpConfig, load_mcp_config


def load_toolset(name: str) -> Toolset:
    """The toolset of a name, or of `module:attr`, which may be a toolset, a tool, a function or a list of them.

    Raises `UsageError` or `SetupError`, see `plugins.find`.
    """
    return toolset_from(plugins.find("toolsets", name), name)


class McpServers(msgspec.Struct, frozen=True, kw_only=True):
    """The MCP servers of a run and what they said they offer; a worker makes the same toolsets of it as the runner."""

    config: McpConfig
    discovery: Discovery


async def ask_mcp_servers(config: RunConfig, environ: Mapping[str, str]) -> McpServers | None:
    """The servers of `--mcp_config`, asked for their tools; None where there are none.

    Raises:
        UsageError: the file is wrong; says where.
        SetupError: it cannot be read, or the library `mcp` is missing.
    """
    if not config.mcp_config:
        return None
    servers = load_mcp_config(config.mcp_config, environ)
    try:
        return McpServers(config=servers, discovery=await discover(servers))
    except ModuleNotFoundError as error:
        raise SetupError(f"--mcp_config needs the library {error.name}.", "pip install 'gristmill[mcp]'") from error


def own_toolsets(config: RunConfig, mcp: McpServers | None) -> dict[str, Toolset]:
    """The toolsets of `--tools` and `--mcp_config`, by name. A module of the current directory is found too.

    Raises:
        UsageError: one cannot be loaded, or has the name of another toolset or of a known tool.
    """
    found: dict[str, Toolset] = {}
    for target in config.tools:
        if ":" not in target:
            raise UsageError(f"--tools {target} is no module:name.")
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        _add(found, toolset_from(plugins.find("toolsets", target)), f"--tools {target}")
    if mcp is not None:
        taken = {*TOOL_TO_TOOLSET_MAP, *(tool.name for toolset in found.values() for tool in toolset.tools)}
        for toolset in mcp_toolsets(mcp.config, mcp.discovery, taken).values():
            _add(found, toolset, f"--mcp_config {config.mcp_config}")
    return found


def _add(found: dict[str, Toolset], toolset: Toolset, flag: str) -> None:
    if toolset.name in found or toolset.name in plugins.names("toolsets"):
        raise UsageError(f"{flag}: there already is a toolset {toolset.name}.", "Name it otherwise.")
    for tool in toolset.tools:
        if tool.name in TOOL_TO_TOOLSET_MAP:
            raise UsageError(f"{flag}: {tool.name} is the name of a built-in tool.", "Name it otherwise.")
    found[toolset.name] = toolset


def find_toolsets(
    config: RunConfig, dataset: Dataset, distribution: Distribution, own: dict[str, Toolset]
) -> tuple[dict[str, Toolset], dict[str, str]]:
    """The toolsets that the distribution and the rows may ask for: those that work here, and why the others do not.

    Args:
        own: the user's, by name; offered whether or not the distribution names them.

    Raises:
        SetupError: one does not work here and `skip_unavailable_toolsets` is off, or none works.
        UsageError: a row names one that does not exist; says which line.
    """
    lines: dict[str, int] = {}
    for task in dataset.tasks:
        for name in task.toolsets or ():
            lines.setdefault(name, task.line)
    offered: dict[str, Toolset] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys((*distribution.names, *lines, *own)):
        single = name.removeprefix(TOOL_PREFIX) if name.startswith(TOOL_PREFIX) else ""
        owner = TOOL_TO_TOOLSET_MAP.get(single, name)
        try:
            toolset = own.get(owner) or load_toolset(owner)
            reason = toolset.missing(config.tool_settings)
        except SetupError as error:
            reason = str(error)
        except UsageError as error:
            if name not in lines:
                raise
            place = f"{config.dataset_file} line {lines[name]}"
            raise UsageError(f"{place}: {error.message}", error.mend) from None
        if reason:
            missing[name] = reason
        else:
            offered[owner] = toolset
    if missing and not config.skip_unavailable_toolsets:
        reasons = " ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise SetupError(
            f"Toolsets of this run cannot work here. {reasons}",
            "Mend that, choose another --distribution, or give --skip_unavailable_toolsets.",
        )
    if missing and not offered:
        raise SetupError(f"None of the toolsets of {distribution.name} can work here.", "See `gristmill doctor`.")
    return offered, missing
