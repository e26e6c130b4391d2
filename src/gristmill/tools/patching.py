"""Edits of text, pure: replacing a text, and V4A patches. Files are whole texts in, whole texts out.

V4A is the patch form that OpenAI's models were trained on:

```
*** Begin Patch
*** Update File: path          *** Add File: path        *** Delete File: path
*** Move to: new path          +every line of it
@@ a line above the change
 context
-removed
+added
*** End of File
*** End Patch
```

A hunk's place is found by its context and removed lines: exactly, else without regard to trailing blanks, else without
regard to indentation. Where a place is not certain, the edit is refused: a wrong edit costs more than another turn.
A text whose lines all end in CRLF is edited as if they ended in LF and keeps its CRLF; a missing last newline stays
missing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gristmill.tools.text import bounded

NEAR_LINES = 8  # lines of the file shown where an edit finds no place
SCAN_LIMIT = 20_000  # lines that are looked through for what is near
NEAR_CANDIDATES = 200  # lines that are compared closely

_LINE_NUMBERS = re.compile(r"-\d+(,\d+)? \+\d+(,\d+)? @@ ?")


class PatchError(ValueError):
    """The edit cannot be made; the text says why, for the model."""


@dataclass
class Hunk:
    """A change in one place: `anchors` are lines above it, `lines` pairs of a sign (` `, `-`, `+`) and a line."""

    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False


@dataclass
class FileChange:
    """What a patch does to one file."""

    action: Literal["add", "update", "delete"]
    path: str
    move_to: str = ""
    content: str = ""  # of an added file
    blanks: int = 0  # empty lines since its last line that have no '+': layout of the patch, if nothing follows
    hunks: list[Hunk] = field(default_factory=list)


# ---- replacing a text


def replace_text(content: str, old: str, new: str, *, replace_all: bool) -> str:
    """The content with `old` replaced. Raises `PatchError` where it is not there, or there several times."""
    if not old:
        raise PatchError("old_string is empty. To make or overwrite a whole file use write_file.")
    if old == new:
        raise PatchError("old_string and new_string are the same: nothing would change.")
    body, restore = _with_plain_newlines(content)
    if body is not content:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    count = body.count(old)
    if count == 0:
        raise PatchError(f"old_string was not found. {_nearest(body, old)}")
    if count > 1 and not replace_all:
        shown = ", ".join(str(number) for number in _places(body, old, 10))
        raise PatchError(
            f"old_string occurs {count} times (lines {shown}{', …' if count > 10 else ''}). "
            "Give more of the lines around it, or set replace_all."
        )
    return restore(body.replace(old, new))


def _with_plain_newlines(content: str) -> tuple[str, Callable[[str], str]]:
    """The content with LF where all its lines end in CRLF, and the way back."""
    pairs = content.count("\r\n")
    if not pairs or pairs != content.count("\n"):
        return content, lambda text: text
    return content.replace("\r\n", "\n"), lambda text: text.replace("\n", "\r\n")


def _places(body: str, old: str, limit: int) -> list[int]:
    """Line numbers of the first occurrences."""
    numbers: list[int] = []
    at, line, counted = body.find(old), 1, 0
    while at >= 0 and len(numbers) < limit:
        line += body.count("\n", counted, at)
        counted = at
        numbers.append(line)
        at = body.find(old, at + len(old))
    return numbers


def _nearest(body: str, old: str) -> str:
    """The lines of the file that look most like the text sought, in a sentence."""
    lines = body.split("\n")[:SCAN_LIMIT]
    wanted = [line.strip() for line in old.strip("\n").split("\n")]
    stripped = [line.strip() for line in lines]
    start = _find_block(stripped, wanted, 0)
    if start >= 0:
        return f"These lines differ from it only in blanks:\n{_numbered(lines, start, len(wanted))}"
    first = next((line for line in wanted if line), "")
    if first in stripped:
        start = stripped.index(first)
    else:
        # Only lines that share its longest word are compared: comparing all would hold up the other sessions.
        word = max(re.findall(r"\w+", first), key=len, default="")
        alike = [line[:500] for line in stripped if word and word in line][:NEAR_CANDIDATES]
        near = difflib.get_close_matches(first[:500], alike, n=1, cutoff=0.5)
        if not near:
            return "Nothing like its first line is in the file; read the file first."
        start = next(index for index, line in enumerate(stripped) if line[:500] == near[0])
    return f"The nearest lines are:\n{_numbered(lines, start, max(len(wanted), 3))}"


def _numbered(lines: Sequence[str], start: int, count: int) -> str:
    shown = lines[start : start + min(count, NEAR_LINES)]
    return "\n".join(f"{start + place + 1:6}|{bounded(line, 200)}" for place, line in enumerate(shown))


def _find_block(lines: Sequence[str], wanted: Sequence[str], start: int) -> int:
    """The first index from `start` where all wanted lines stand, or -1."""
    last = len(lines) - len(wanted)
    while wanted and start <= last:
        try:
            start = lines.index(wanted[0], start, last + 1)
        except ValueError:
            return -1
        if lines[start : start + len(wanted)] == wanted:
            return start
        start += 1
    return -1


# ---- V4A


def parse_patch(text: str) -> list[FileChange]:
    """The changes of a V4A patch. Raises `PatchError` with the number of the line that is wrong."""
    changes: list[FileChange] = []
    change: FileChange | None = None
    for number, raw in enumerate(text.strip("\r\n").split("\n"), start=1):
        line = raw.removesuffix("\r")
        if line.startswith("*** "):
            if line.strip() == "*** End Patch":
                break
            change = _directive(line.strip(), change, changes, number)
        elif change is not None:
            _body_line(change, line, number)
        elif line.strip():
            raise PatchError(
                f"Line {number} of the patch comes before any '*** Update File: path': {bounded(line, 80)}"
            )
    if not changes:
        raise PatchError("The patch names no file: it needs '*** Update File: path', Add File or Delete File.")
    for change in changes:
        if change.action == "update" and not change.move_to and not any(hunk.lines for hunk in change.hunks):
            raise PatchError(f"The patch changes nothing in {change.path!r}.")
    paths = [path for change in changes for path in (change.path, change.move_to) if path]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise PatchError(f"The patch names {twice!r} twice: put all hunks of a file under one header.")
    return changes


def _directive(line: str, change: FileChange | None, changes: list[FileChange], number: int) -> FileChange | None:
    if line == "*** Begin Patch":
        return None
    if line == "*** End of File":
        if change is not None and change.hunks:
            change.hunks[-1].at_end = True
        return change
    word, _, path = line[4:].partition(":")
    path = path.strip()
    if word == "Move to" and path and change is not None and change.action == "update":
        change.move_to = path
        return change
    action: Literal["add", "update", "delete"]
    match word:
        case "Add File":
            action = "add"
        case "Update File":
            action = "update"
        case "Delete File":
            action = "delete"
        case _:
            raise PatchError(f"Line {number} of the patch is no known directive here: {bounded(line, 80)}")
    if not path:
        raise PatchError(f"Line {number} of the patch names no path: {bounded(line, 80)}")
    changes.append(FileChange(action, path))
    return changes[-1]


def _body_line(change: FileChange, line: str, number: int) -> None:
    if change.action == "add":
        if not line:
            change.blanks += 1
            return
        if change.blanks or not line.startswith("+"):
            number -= change.blanks
            raise PatchError(
                f"Line {number} of the patch: every line of an added file starts with '+', an empty one too."
            )
        change.content += line[1:] + "\n"
        return
    if change.action == "delete":
        if line.strip():
            raise PatchError(f"Line {number} of the patch: nothing follows a Delete File.")
        return
    if line.startswith("@@"):
        anchor = _LINE_NUMBERS.sub("", line[2:].strip(), count=1)
        if not change.hunks or change.hunks[-1].lines:
            change.hunks.append(Hunk())
        if anchor:
            change.hunks[-1].anchors.append(anchor)
        return
    sign, text = (line[0], line[1:]) if line else (" ", "")  # models leave the blank of an empty context line out
    if sign not in " -+":
        raise PatchError(f"Line {number} of the patch must start with ' ', '-', '+' or '@@': {bounded(line, 80)}")
    if not change.hunks:
        change.hunks.append(Hunk())
    change.hunks[-1].lines.append((sign, text))


def apply_hunks(content: str, hunks: Sequence[Hunk]) -> str:
    """The content with all hunks applied. Raises `PatchError` where one has no certain place."""
    body, restore = _with_plain_newlines(content)
    lines = body.split("\n")
    edits: list[tuple[int, int, int, list[str]]] = []
    position = 0
    for number, hunk in enumerate(hunks, start=1):
        if hunk.lines:
            start, end = _place(lines, hunk, position, number)
            if any(start < other_end and other_start < end for other_start, other_end, *_ in edits):
                raise PatchError(f"Hunk {number} changes lines that an earlier hunk changes.")
            edits.append((start, end, number, _replacement(lines, hunk, start)))
            position = max(position, end)
    # From the bottom up, so that line numbers above stay true; of two insertions in one place the later goes in first.
    for start, end, _, new in sorted(edits, key=lambda edit: edit[:3], reverse=True):
        lines[start:end] = new
    return restore("\n".join(lines))


def _place(lines: list[str], hunk: Hunk, position: int, number: int) -> tuple[int, int]:
    """The lines that a hunk replaces: from its start up to, not including, its end."""
    for depth, anchor in enumerate(hunk.anchors):
        below = _after_anchor(lines, anchor, position)
        if below < 0 and depth == 0:
            below = _after_anchor(lines, anchor, 0)  # hunks out of order
        if below < 0:
            near = _nearest("\n".join(lines), anchor)
            raise PatchError(f"Hunk {number}: there is no line {bounded(anchor, 80)!r}. {near}")
        position = below
    old = [text for sign, text in hunk.lines if sign != "+"]
    found = _matches(lines, old, position)
    while not found and old and hunk.lines[-1] == (" ", ""):
        # An empty line before the next directive may be layout of the patch instead of context.
        old.pop()
        hunk.lines.pop()
        found = _matches(lines, old, position)
    if not old:
        if hunk.anchors:
            return position, position
        end = len(lines) - 1 if lines[-1] == "" else len(lines)
        return end, end
    if not found and not hunk.anchors:
        found = _matches(lines, old, 0)  # hunks out of order
    if hunk.at_end:
        ends = (len(lines), len(lines) - 1 if lines[-1] == "" else len(lines))
        found = [start for start in found if start + len(old) in ends]
    if not found:
        near = _nearest("\n".join(lines), "\n".join(old))
        raise PatchError(f"Hunk {number} was not found{_where(hunk)}. {near}")
    if len(found) > 1 and not hunk.anchors:
        shown = ", ".join(str(start + 1) for start in found[:10])
        raise PatchError(
            f"Hunk {number} fits in {len(found)} places (lines {shown}). "
            "Give more context lines, or an '@@' line with a line above the change."
        )
    return found[0], found[0] + len(old)


def _where(hunk: Hunk) -> str:
    return f" below the line {bounded(hunk.anchors[-1], 80)!r}" if hunk.anchors else ""


def _after_anchor(lines: list[str], anchor: str, position: int) -> int:
    """The index below the first line from `position` on that is the anchor, or -1."""
    return next((at + 1 for at in range(position, len(lines)) if lines[at].strip() == anchor), -1)


def _matches(lines: list[str], old: list[str], position: int) -> list[int]:
    """Where the old lines stand from `position` on, by the strictest comparison that finds any place."""
    for compare in (None, str.rstrip, str.strip):
        have = [compare(line) for line in lines] if compare else lines
        wanted = [compare(line) for line in old] if compare else old
        found: list[int] = []
        start = _find_block(have, wanted, position)
        while start >= 0:
            found.append(start)
            start = _find_block(have, wanted, start + 1)
        if found:
            return found
    return []


def _replacement(lines: list[str], hunk: Hunk, start: int) -> list[str]:
    """The hunk's new lines: context as the file has it, added lines moved to the file's indentation."""
    new: list[str] = []
    index = start
    have = want = ""
    for sign, text in hunk.lines:
        if sign == "+":
            new.append(have + text.removeprefix(want) if text.startswith(want) and text.strip() else text)
            continue
        line = lines[index]
        if line.strip() and line.rstrip() != text.rstrip():
            have, want = _indent(line), _indent(text)
        elif line.strip():
            have = want = ""
        if sign == " ":
            new.append(line)
        index += 1
    return new


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
