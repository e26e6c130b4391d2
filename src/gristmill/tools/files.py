"""`read_file` and `write_file`, and the toolset `file`. Paths are relative to the shell's working directory."""

from __future__ import annotations

import shlex
from typing import Any

from gristmill.tools.base import Access, Tool, ToolContext, Toolset
from gristmill.tools.edit_files import PATCH
from gristmill.tools.sandbox_files import FILE_SECONDS, because, missing, read, resolve, touches, write
from gristmill.tools.search_files import SEARCH_FILES
from gristmill.tools.text import bounded, decode, without_torn_end
from gristmill.types import ToolSchema

READ_BYTES = 1_000_000  # files up to this size are read at once, larger ones by lines inside the sandbox
LINE_LIMIT = 2_000  # characters shown of one line
CONTENT_LIMIT = 60_000  # characters shown of one page


async def run_read(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """A page of numbered lines."""
    path = await resolve(context, arguments["path"])
    offset, limit = arguments.get("offset", 1), arguments.get("limit", 500)
    try:
        data = await read(context, path, READ_BYTES + 1)
    except FileNotFoundError:
        return {"error": await missing(context, path)}
    except OSError as error:
        return {"error": because(error, path)}
    if b"\0" in data[:8192]:
        size = f"{len(data):,}" if len(data) <= READ_BYTES else f"over {READ_BYTES:,}"
        return {"error": f"{path} is a binary file of {size} bytes: use file, xxd or strings in the terminal."}
    if len(data) > READ_BYTES:
        return await _read_large(context, path, offset, limit)
    lines, odd = _lines(data)
    return _page(lines[offset - 1 : offset - 1 + limit], offset, len(lines), len(data), odd)


def _lines(data: bytes) -> tuple[list[str], bool]:
    """The lines without their ends, and whether bytes were not UTF-8."""
    text, odd = decode(data.removeprefix(b"\xef\xbb\xbf"))
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines, odd


def _page(lines: list[str], offset: int, total: int, size: int, odd: bool) -> dict[str, Any]:
    """The result for these lines, the first of which has the number `offset`."""
    if offset > max(total, 1):
        return {"error": f"offset {offset} is past the end: the file has {total} lines."}
    numbered: list[str] = []
    room = CONTENT_LIMIT
    carriage = False
    for number, line in enumerate(lines, start=offset):
        if line.endswith("\r"):
            line, carriage = line[:-1], True
        shown = f"{number:6}|{bounded(line, LINE_LIMIT, f'… [line of {len(line):,} characters]')}"
        room -= len(shown) + 1
        if room < 0 and numbered:
            break
        numbered.append(shown)
    last = offset - 1 + len(numbered)
    result: dict[str, Any] = {
        "content": "\n".join(numbered),
        "total_lines": total,
        "file_size": size,
        "truncated": last < total,
    }
    if last < total:
        result["hint"] = f"Lines {offset} to {last} of {total}; go on with offset={last + 1}."
    if carriage:
        result["line_endings"] = "CRLF"
    if odd:
        result["note"] = "The file is not plain UTF-8 text: other bytes are shown as \ufffd and NUL as \\x00."
    if not total:
        result["note"] = "The file is empty."
    return result


async def _read_large(context: ToolContext, path: str, offset: int, limit: int) -> dict[str, Any]:
    name = shlex.quote(path)
    script = (
        f"wc -c <{name}; wc -l <{name}; tail -c 1 <{name} | wc -l; "
        f"tail -n +{offset} <{name} | head -n {limit} | head -c {CONTENT_LIMIT * 4}"
    )
    result = await context.sandbox.exec(f"( {script} )", timeout=FILE_SECONDS, stateful=False)
    try:
        size, newlines, last, data = result.output.split(b"\n", 3)
        total = int(newlines) + (1 - int(last))
        bytes_all = int(size)
    except ValueError:
        return {"error": f"{path} could not be read: {bounded(decode(result.output)[0], 300)}"}
    lines, odd = _lines(without_torn_end(data))
    if len(data) >= CONTENT_LIMIT * 4 and len(lines) > 1:
        lines.pop()  # the byte limit cut it
    return _page(lines, offset, total, bytes_all, odd)


async def run_write(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make or replace a file."""
    path = await resolve(context, arguments["path"])
    data = arguments["content"].encode()
    try:
        await write(context, path, data)
    except OSError as error:
        return {"error": because(error, path)}
    return {"bytes_written": len(data), "path": path}


# ---- the toolset


def _read_access(arguments: dict[str, Any]) -> Access:
    return touches(arguments["path"], writes=False)


def _write_access(arguments: dict[str, Any]) -> Access:
    return touches(arguments["path"], writes=True)


_PATH = {"type": "string", "minLength": 1, "description": "Relative to the working directory, absolute, or from ~."}

READ_FILE = Tool(
    schema=ToolSchema(
        name="read_file",
        description="Read a text file as numbered lines (`  12|text`), a page at a time.",
        parameters={
            "type": "object",
            "properties": {
                "path": _PATH,
                "offset": {"type": "integer", "minimum": 1, "default": 1, "description": "Number of the first line."},
                "limit": {"type": "integer", "minimum": 1, "maximum": 2000, "default": 500, "description": "Lines."},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    ),
    toolset="file",
    run=run_read,
    access=_read_access,
)

WRITE_FILE = Tool(
    schema=ToolSchema(
        name="write_file",
        description="Make a file or replace its whole content; missing folders are made. To change a part, use patch.",
        parameters={
            "type": "object",
            "properties": {"path": _PATH, "content": {"type": "string", "description": "The whole new content."}},
            "required": ["path", "content"],
            "additionalProperties": False,
        },
    ),
    toolset="file",
    run=run_write,
    access=_write_access,
)

FILE = Toolset(name="file", tools=(READ_FILE, WRITE_FILE, PATCH, SEARCH_FILES))
