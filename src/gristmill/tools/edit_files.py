"""`patch`: edits files by a text to replace or by a V4A patch; all files of a patch or none.

Bytes that are not UTF-8 pass through unchanged.
"""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import dataclass
from typing import Any

from gristmill.tools.base import Access, Tool, ToolContext
from gristmill.tools.diff import unified_diff
from gristmill.tools.patching import FileChange, PatchError, apply_hunks, parse_patch, replace_text
from gristmill.tools.sandbox_files import FILE_SECONDS, because, missing, read, resolve, touches, write
from gristmill.tools.text import bounded, decode, shorten, valid_text
from gristmill.types import ToolSchema

EDIT_BYTES = 10_000_000  # the largest file that is edited
DIFF_LIMIT = 20_000  # characters shown of a diff


async def run_patch(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Edit one file by text, or several by a V4A patch; all or nothing."""
    by_patch = "patch" in arguments and "old_string" not in arguments
    mode = arguments.get("mode") or ("patch" if by_patch else "replace")
    try:
        if mode == "patch":
            if "patch" not in arguments:
                raise PatchError("mode=patch needs the argument 'patch'.")
            changes = parse_patch(arguments["patch"])
            edits = [await _planned(context, change) for change in changes]
        else:
            edits = [await _replaced(context, arguments)]
        await _commit(context, edits)
    except PatchError as error:
        return {"success": False, "error": str(error)}
    diff = "\n".join(unified_diff(_text(e.before), _text(e.after), e.path, e.move_to) for e in edits)
    result: dict[str, Any] = {
        "success": True,
        "diff": shorten(valid_text(diff), DIFF_LIMIT),
        "files_modified": [
            edit.move_to or edit.path for edit in edits if edit.before is not None and edit.after is not None
        ],
    }
    if created := [edit.path for edit in edits if edit.before is None]:
        result["files_created"] = created
    if deleted := [edit.path for edit in edits if edit.after is None]:
        result["files_deleted"] = deleted
    return result


@dataclass(frozen=True)
class _Edit:
    """One file before and after; None where it is not there."""

    path: str
    before: bytes | None
    after: bytes | None
    move_to: str = ""


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogateescape")


async def _replaced(context: ToolContext, arguments: dict[str, Any]) -> _Edit:
    lacking = [name for name in ("path", "old_string", "new_string") if name not in arguments]
    if lacking:
        raise PatchError(
            f"mode=replace needs the arguments path, old_string and new_string; missing: {', '.join(lacking)}."
        )
    path = await resolve(context, arguments["path"])
    before = await _whole(context, path)
    content = before.decode("utf-8", "surrogateescape")
    replace_all = arguments.get("replace_all", False)
    after = replace_text(content, arguments["old_string"], arguments["new_string"], replace_all=replace_all)
    return _Edit(path, before, after.encode("utf-8", "surrogateescape"))


async def _planned(context: ToolContext, change: FileChange) -> _Edit:
    path = await resolve(context, change.path)
    target = await resolve(context, change.move_to) if change.move_to else ""
    for absent in (path if change.action == "add" else "", target):
        if absent and await _exists(context, absent):
            raise PatchError(f"{absent} exists already; use Update File, or delete it first.")
    if change.action == "add":
        return _Edit(path, None, change.content.encode())
    before = await _whole(context, path)
    if change.action == "delete":
        return _Edit(path, before, None)
    try:
        after = apply_hunks(before.decode("utf-8", "surrogateescape"), change.hunks)
    except PatchError as error:
        raise PatchError(f"{path}: {error} No file was changed.") from None
    return _Edit(path, before, after.encode("utf-8", "surrogateescape"), target)


async def _commit(context: ToolContext, edits: list[_Edit]) -> None:
    """Make all edits; where one fails, put back those made before it and raise `PatchError`."""
    written: list[_Edit] = []
    try:
        for edit in edits:
            if edit.after is not None and edit.after != edit.before:
                written.append(edit)
                await write(context, edit.path, edit.after)
        # Moves come after the contents and keep the file's mode; removals come last, being the hardest to undo.
        steps = [
            f"mkdir -p -- {shlex.quote(posixpath.dirname(edit.move_to) or '.')} && "
            f"mv -- {shlex.quote(edit.path)} {shlex.quote(edit.move_to)}"
            for edit in edits
            if edit.move_to
        ]
        steps += [f"rm -f -- {shlex.quote(edit.path)}" for edit in edits if edit.after is None]
        if steps:
            await _shell(context, " && ".join(steps))
    except OSError as error:
        undo = [
            f"[ -e {shlex.quote(edit.path)} ] || mv -- {shlex.quote(edit.move_to)} {shlex.quote(edit.path)}"
            for edit in edits
            if edit.move_to
        ]
        undo += [f"rm -f -- {shlex.quote(edit.path)}" for edit in written if edit.before is None]
        await context.sandbox.exec(f"( {'; '.join(undo) or ':'} )", timeout=FILE_SECONDS, stateful=False)
        for edit in edits:
            if edit.before is not None and (edit in written or edit.after is None):
                await write(context, edit.path, edit.before)
        why = because(error, error.filename) if error.filename else f"{error}."
        raise PatchError(f"No file was changed. {why}") from error


async def _shell(context: ToolContext, script: str) -> None:
    result = await context.sandbox.exec(f"( {script} )", timeout=FILE_SECONDS, stateful=False)
    if result.exit_code != 0:
        raise OSError(bounded(decode(result.output)[0].strip(), 300))


async def _whole(context: ToolContext, path: str) -> bytes:
    try:
        data = await read(context, path, EDIT_BYTES + 1)
    except FileNotFoundError:
        raise PatchError(await missing(context, path)) from None
    except OSError as error:
        raise PatchError(because(error, path)) from error
    if len(data) > EDIT_BYTES:
        raise PatchError(f"{path} is larger than {EDIT_BYTES:,} bytes: edit it in the terminal.")
    return data


async def _exists(context: ToolContext, path: str) -> bool:
    try:
        await read(context, path, 1)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


# ---- the tool


def _access(arguments: dict[str, Any]) -> Access:
    if "patch" in arguments or "path" not in arguments:
        return Access(("sandbox", "files"), writes=True)
    return touches(arguments["path"], writes=True)


PATCH = Tool(
    schema=ToolSchema(
        name="patch",
        description=(
            "Edit files. mode=replace changes old_string, which must occur exactly once, to new_string in one file. "
            "mode=patch applies a V4A patch (*** Begin Patch, *** Update File: path, @@, lines with ' ', '-' or '+', "
            "*** End Patch) to one or more files, all or none."
        ),
        parameters={
            "type": "object",
            "properties": {
                "mode": {"type": "string", "enum": ["replace", "patch"], "default": "replace"},
                "path": {"type": "string", "minLength": 1, "description": "The file of mode=replace."},
                "old_string": {"type": "string", "description": "Text to replace, with its blanks and line breaks."},
                "new_string": {"type": "string", "description": "Text to put there; empty removes."},
                "replace_all": {"type": "boolean", "default": False, "description": "Replace every occurrence."},
                "patch": {"type": "string", "description": "The patch of mode=patch."},
            },
            "required": [],
            "additionalProperties": False,
        },
    ),
    toolset="file",
    run=run_patch,
    access=_access,
)
