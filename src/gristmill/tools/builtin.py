"""The built-in tools' table: which tool belongs to which toolset, and where each toolset is found. Imports no tool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

# Where each toolset's `Toolset` object is found; `plugins.find` loads it when a run asks for it.
BUILTIN_TOOLSETS: Mapping[str, str] = MappingProxyType(
    {
        "web": "gristmill.tools.web:WEB",
        "search": "gristmill.tools.web:SEARCH",
        "vision": "gristmill.tools.vision:VISION",
        "image_gen": "gristmill.tools.image_gen:IMAGE_GEN",
        "terminal": "gristmill.tools.terminal:TERMINAL",
        "file": "gristmill.tools.files:FILE",
        "browser": "gristmill.tools.browser:BROWSER",
    }
)
