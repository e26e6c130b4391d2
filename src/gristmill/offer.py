"""Which toolsets a run can offer: built-in ones, those of plug-ins, the user's own functions, and MCP servers."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gristmill import plugins
from gristmill.config import RunConfig, environment
from gristmill.distribution_rules import NOTHING, TOOL_PREFIX, Distribution
from gristmill.errors import SetupError, UsageError
from gristmill.task import Dataset
from gristmill.tools.base import Toolset
from gristmill.tools.builtin import BUILTIN_TOOLSETS, TOOL_TO_TOOLSET_MAP
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


async def ask_mcp_servers(path: str | None) -> McpServers | None:
    """The servers of the file of `--mcp_config`, asked for their tools; None where there is no file.

    Raises:
        UsageError: the file is wrong; says where.
        SetupError: it cannot be read, or the library `mcp` is missing.
    """
    if not path:
        return None
    servers = load_mcp_config(path, environment())
    try:
        return McpServers(config=servers, discovery=await discover(servers))
    except ModuleNotFoundError as error:
        raise SetupError(f"--mcp_config needs the library {error.name}.", "pip install 'gristmill[mcp]'") from error


@dataclass(frozen=True)
class Offer:
    """Which toolsets a run can offer.

    `toolsets` are those that work here, by name; `missing` says for each other name that may be drawn why not. `always`
    are the user's own of which the distribution names nothing: every drawn session gets them too.
    """

    toolsets: Mapping[str, Toolset]
    missing: Mapping[str, str]
    always: tuple[str, ...]


def own_toolsets(config: RunConfig, mcp: McpServers | None) -> dict[str, Toolset]:
    """The toolsets of `--tools` and `--mcp_config`, by name. A module of the current directory is found too.

    Raises:
        UsageError: one cannot be loaded, or has the name of another toolset or of a known tool.
    """
    found: dict[str, Toolset] = {}
    for target in config.tools:
        toolset = _load_own(target)
        if same := found.pop(toolset.name, None):  # several functions of one toolset, each given by its name
            toolset = _joined(same, toolset)
        _add(found, toolset, f"--tools {target}")
    if mcp is not None:
        taken = {*TOOL_TO_TOOLSET_MAP, *(tool.name for toolset in found.values() for tool in toolset.tools)}
        for toolset in mcp_toolsets(mcp.config, mcp.discovery, taken).values():
            _add(found, toolset, f"--mcp_config {config.mcp_config}")
    return found


def _load_own(target: str) -> Toolset:
    if ":" not in target:
        raise UsageError(f"--tools {target} is no module:name.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return toolset_from(plugins.find("toolsets", target))
    except UsageError as error:
        raise type(error)(f"--tools {target}: {error.message}", error.mend) from error
    except Exception as error:
        raise UsageError(f"--tools {target} cannot be imported: {type(error).__name__}: {error}.") from error


def _joined(first: Toolset, second: Toolset) -> Toolset:
    def missing(settings: Mapping[str, str]) -> str:
        return first.missing(settings) or second.missing(settings)

    return Toolset(first.name, (*first.tools, *second.tools), missing)


def _add(found: dict[str, Toolset], toolset: Toolset, flag: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", toolset.name) or toolset.name == NOTHING:
        raise UsageError(f"{flag}: {toolset.name!r} cannot be a toolset's name.", "Use letters, digits, _, . and -.")
    if toolset.name in found or toolset.name in plugins.names("toolsets"):
        raise UsageError(f"{flag}: there already is a toolset {toolset.name}.", "Name it otherwise.")
    others = {tool.name for other in found.values() for tool in other.tools}
    names: set[str] = set()
    for tool in toolset.tools:
        if tool.name in TOOL_TO_TOOLSET_MAP:
            raise UsageError(f"{flag}: {tool.name} is the name of a built-in tool.", "Name it otherwise.")
        if tool.name in others | names:
            raise UsageError(f"{flag}: there already is a tool {tool.name}.", "Name it otherwise.")
        names.add(tool.name)
    found[toolset.name] = toolset


def known_tools(own: Mapping[str, Toolset]) -> list[str] | None:
    """The names that may follow `tool:`; None where a server that does not answer may have more."""
    if any(not toolset.tools for toolset in own.values()):
        return None
    return [*TOOL_TO_TOOLSET_MAP, *(tool.name for _, toolset in _added(own) for tool in toolset.tools)]


def _added(own: Mapping[str, Toolset]) -> Iterator[tuple[str, Toolset]]:
    """The toolsets that are not built in: the user's own, then those of plug-ins that can be loaded."""
    yield from own.items()
    for name in plugins.names("toolsets"):
        if name not in BUILTIN_TOOLSETS:
            with contextlib.suppress(UsageError):  # told where a run asks for it
                yield name, load_toolset(name)


def find_toolsets(config: RunConfig, dataset: Dataset, distribution: Distribution, own: Mapping[str, Toolset]) -> Offer:
    """The toolsets that the distribution and the rows may ask for, and the user's own.

    Raises:
        UsageError: a row names one that does not exist; says which line.
    """
    lines: dict[str, int] = {}
    for task in dataset.tasks:
        for name in task.toolsets or ():
            lines.setdefault(name, task.line)
    offered: dict[str, Toolset] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys((*distribution.names, *lines, *own)):
        try:
            owner = _owner(name, own)
            toolset = own.get(owner) or load_toolset(owner)
            reason = toolset.missing(config.tool_settings) or _cannot_see(owner, config)
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
    named = {*distribution.names}
    always = tuple(
        name
        for name, toolset in own.items()
        if name in offered and named.isdisjoint((name, *(TOOL_PREFIX + tool.name for tool in toolset.tools)))
    )
    return Offer(offered, missing, always)


def _owner(name: str, own: Mapping[str, Toolset]) -> str:
    """The toolset that a drawn name stands for or belongs to. Raises `UsageError` or `SetupError`."""
    if not name.startswith(TOOL_PREFIX):
        return name
    single = name.removeprefix(TOOL_PREFIX)
    if single in TOOL_TO_TOOLSET_MAP:
        return TOOL_TO_TOOLSET_MAP[single]
    for owner, toolset in _added(own):
        if any(tool.name == single for tool in toolset.tools):
            return owner
    known = known_tools(own)
    if known is None:
        raise SetupError(f"no toolset that works here has the tool {single}.")
    raise UsageError(f"Unknown tool: {single}.", f"Known are {', '.join(known)}.")


def _cannot_see(name: str, config: RunConfig) -> str:
    """Why nobody can look at pictures although the tool works; empty where somebody may."""
    if name != "vision" or not config.model.local or config.tool_settings.get("VISION_BASE_URL"):
        return ""
    return "The embedded model sees no pictures; VISION_MODEL and VISION_BASE_URL name one that does."
