"""The built-in tools' table: which tool belongs to which toolset, and where each toolset is found. Imports no tool."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from gristmill.errors import UsageError
from gristmill.tools.base import Toolset

# Every built-in tool and the toolset it is counted under (`search` offers web's web_search). The order is that of
# `tool_stats` in every row and of the tools in every request.
TOOL_TO_TOOLSET_MAP: Mapping[str, str] = MappingProxyType(
    {
        "web_search": "web",
        "web_extract": "web",
        "vision_analyze": "vision",
        "image_generate": "image_gen",
        "terminal": "terminal",
        "process": "terminal",
        "read_file": "file",
        "write_file": "file",
        "patch": "file",
        "search_files": "file",
        "browser_navigate": "browser",
        "browser_snapshot": "browser",
        "browser_click": "browser",
        "browser_type": "browser",
        "browser_scroll": "browser",
        "browser_back": "browser",
        "browser_press": "browser",
        "browser_get_images": "browser",
        "browser_console": "browser",
        "browser_vision": "browser",
    }
)
TOOL_ORDER: Mapping[str, int] = MappingProxyType({name: place for place, name in enumerate(TOOL_TO_TOOLSET_MAP)})

# Where each toolset's `Toolset` object is found; loaded only when a session is offered it.
BUILTIN_TOOLSETS: Mapping[str, str] = MappingProxyType(
    {
        "web": "gristmill.tools.web:WEB",
        "search": "gristmill.tools.web:SEARCH",
        "vision": "gristmill.tools.vision:VISION",
        "image_gen": "gristmill.tools.image_gen:IMAGE_GEN",
        "terminal": "gristmill.tools.terminal:TERMINAL",
        "file": "gristmill.tools.files:FILE",
    }
)


def load_builtin(name: str) -> Toolset:
    """The built-in toolset of that name. Raises `UsageError` where there is none."""
    place = BUILTIN_TOOLSETS.get(name)
    if place is None:
        raise UsageError(f"Unknown toolset: {name}.", f"Built in are {', '.join(BUILTIN_TOOLSETS)}.")
    module, _, attribute = place.partition(":")
    toolset = getattr(import_module(module), attribute)
    if not isinstance(toolset, Toolset):
        raise TypeError(f"{place} is not a Toolset")
    return toolset
