"""Files of the sandbox as the file tools see them: paths, bounded reads and writes, errors in words."""

from __future__ import annotations

import asyncio
import difflib
import posixpath
import shlex

from gristmill.tools.base import Access, ToolContext
from gristmill.tools.text import decode

FILE_SECONDS = 30.0  # how long one file operation may take


async def resolve(context: ToolContext, path: str) -> str:
    """The path with `~` replaced by the sandbox's home. Raises ValueError for what can be no path."""
    if not path.strip():
        raise ValueError("The path is empty.")
    if "\0" in path:
        raise ValueError("A path cannot hold a NUL character.")
    if path != "~" and not path.startswith("~/"):
        return path
    state: dict[str, str] = context.state.setdefault("file", {})
    if "home" not in state:
        result = await context.sandbox.exec('printf %s "$HOME"', timeout=FILE_SECONDS, stateful=False)
        state["home"] = decode(result.output)[0] or "/"
    return state["home"] + path[1:]


async def read(context: ToolContext, path: str, limit: int) -> bytes:
    """The first `limit` bytes. Raises OSError, TimeoutError for what does not end in time."""
    async with asyncio.timeout(FILE_SECONDS):  # a pipe or a device may never end
        return await context.sandbox.read(path, limit)


async def write(context: ToolContext, path: str, data: bytes) -> None:
    """Replace the content. Raises OSError."""
    async with asyncio.timeout(FILE_SECONDS):
        await context.sandbox.write(path, data)


def because(error: OSError, path: str) -> str:
    """A file error in a sentence for the model."""
    match error:
        case IsADirectoryError():
            return f"{path} is a folder; list it with search_files (target=files) or in the terminal."
        case PermissionError():
            return f"{error.strerror or 'Permission denied'}: {path}."  # or "Not a regular file"
        case TimeoutError():
            return f"{path} took longer than {FILE_SECONDS:g} s; it may be a pipe or a device."
        case FileNotFoundError():
            return f"There is no such path: {path}."
    return f"{path}: {error.strerror or error}."


async def missing(context: ToolContext, path: str) -> str:
    """Why there is no such file, with names that come near."""
    folder, name = posixpath.split(path)
    where = shlex.quote(folder or ".")
    script = f"( [ -d {where} ] || exit 3; ls -1A -- {where} 2>/dev/null | head -n 500 )"
    result = await context.sandbox.exec(script, timeout=FILE_SECONDS, stateful=False)
    if result.exit_code == 3:
        return f"There is no file {path}: its folder {folder or '.'} does not exist."
    names = decode(result.output)[0].splitlines()
    by_case = {entry.lower(): entry for entry in names}
    near = difflib.get_close_matches(name.lower(), by_case, n=5, cutoff=0.5)
    hint = (
        f" Similar names there: {', '.join(posixpath.join(folder, by_case[entry]) for entry in near)}." if near else ""
    )
    return f"There is no file {path}.{hint}"


def touches(path: str, *, writes: bool) -> Access:
    """What a call on one file touches: named by the last part, in which two spellings of a path agree."""
    return Access(("sandbox", "files", posixpath.basename(path.rstrip("/"))), writes=writes)
