"""`search_files`: lines by a regular expression, or files by a glob, in one command inside the sandbox.

find lists the files in path order; ripgrep searches them where it is installed, grep elsewhere, BusyBox's too. The rest
of the pipe and the parsing are the same for all, so the results are; only a BusyBox built without locales takes each
byte for a character. `.git` and our own folder are left out, hidden and ignored files are not. Lines with NUL bytes are
binary and left out.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import Any

from gristmill.sandbox.base import OUTPUT_HEAD, ExecResult
from gristmill.tools.base import Access, Tool, ToolContext
from gristmill.tools.sandbox_files import resolve
from gristmill.tools.search_pattern import Pattern, expand_braces, glob_to_posix, quote_posix, read_pattern
from gristmill.tools.text import bounded, decode, json_text, without_torn_end
from gristmill.types import ToolSchema

SEARCH_SECONDS = 60.0
COUNT_LIMIT = 100_000  # results counted; `total_count` says no more
ROW_BYTES = 1_000  # of one result, its path included
LINE_LIMIT = 500  # characters shown of one line
ANSWER_LIMIT = 60_000  # characters of all results of one answer
LEFT_OUT = (".git", ".gristmill")

_LISTED = {"content": "matches", "files_only": "files", "count": "counts"}
_FAULT = 90  # exit codes of the script
_NO_PATH = 91
_LINE = re.compile(rb"(\d+)([:-])(.*)", re.DOTALL)
_TEXT_ONLY = (
    r"tr '\0' '\1' | cut -b 1-" + str(ROW_BYTES) + r" | sed $'/\1.*\1/d'"
)  # after it a row is path\1number:line


async def run_search(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Search the content of files, or their names."""
    mode = arguments.get("output_mode", "content")
    offset, limit = arguments.get("offset", 0), arguments.get("limit", 50)
    around = arguments.get("context", 0) if mode == "content" else 0
    root = await resolve(context, arguments.get("path") or ".")
    if arguments.get("target") == "files":
        mode, around = "files_only", 0
        script = f"{_start(root, arguments['pattern'])}; files | tr '\\0\\n' '\\n?' | {_window(offset, limit)}"
    else:
        files = _start(root, arguments.get("file_glob") or "*")
        engine = _engine(read_pattern(arguments["pattern"]))
        script = f"{files}; {engine}; {_listing(mode, offset, limit, around)}"
    result = await context.sandbox.exec(f"( {script}; ) 2>/dev/null", timeout=SEARCH_SECONDS, stateful=False)
    if result.timed_out:
        return {"error": f"The search took longer than {SEARCH_SECONDS:g} s: narrow path, file_glob or pattern."}
    if result.exit_code == _NO_PATH:
        return {"error": f"There is no such path: {root}."}
    if result.exit_code != 0:
        return {"error": bounded(decode(result.output)[0].strip(), 1000) or "The search failed."}
    rows, total = _rows(result)
    found: list[Any]
    if mode == "content":
        found = _matches(rows, around)
        found = found[offset : offset + limit] if around else found
    elif mode == "count":
        found = [(_path(path), int(number)) for number, path in (row.split(None, 1) for row in rows)]
    else:
        found = [_path(row) for row in rows]
    found = _fitting(found)
    end = offset + len(found)
    shown: dict[str, Any] = {
        "total_count": total,
        _LISTED[mode]: dict(found) if mode == "count" else found,
        "truncated": end < total,
    }
    if end < total:
        shown["hint"] = f"{len(found)} of {total} from offset {offset}; go on with offset={end}."
    return shown


def _fitting(found: list[Any]) -> list[Any]:
    """The first results that fit into one answer."""
    room = ANSWER_LIMIT
    for index, entry in enumerate(found):
        room -= len(json_text(entry))
        if room < 0:
            return found[: max(1, index)]
    return found


# ---- the script


def _start(root: str, glob: str) -> str:
    """Checks, and `files`: prints the files under `root` that fit the glob, in path order, NUL-separated.

    A glob without a slash is one for names; others are relative to the root.
    """
    root = root.rstrip("/") or "/"
    if root.startswith("-"):
        root = "./" + root
    skipped = " -o ".join(f"-name {name}" for name in LEFT_OUT if name != posixpath.basename(root))
    find = f"find -H {shlex.quote(root)} \\( {skipped} \\) -prune -o -type f"
    globs = expand_braces(glob.removeprefix("./"))
    if any("/" in each for each in globs):
        fits = "|".join(glob_to_posix(each.lstrip("/") if "/" in each else "**/" + each) for each in globs)
        fits = f"^{quote_posix(root.rstrip('/') + '/')}({fits})$"
        find = f"{find} -print0 2>/dev/null | grep -zE -e {shlex.quote(fits)}"
    else:
        names = " -o ".join(f"-name {shlex.quote(each)}" for each in globs)
        find = f"{find} \\( {names} \\) -print0 2>/dev/null"
    return (
        f"set +eu; export LC_ALL=C; [ -e {shlex.quote(root)} ] || exit {_NO_PATH}; "
        f"type find xargs sort >/dev/null || {{ echo 'search_files needs find, xargs and sort'; exit {_FAULT}; }}; "
        f"files() {{ {find} | sort -z; }}"
    )


def _engine(pattern: Pattern) -> str:
    """`search OPTIONS`: prints path NUL number:line for each match; on a bad pattern the script ends with a message."""
    rust, case = shlex.quote(pattern.rust), "-i" if pattern.ignore_case else ""
    check = f'[ $? -lt 2 ] || {{ printf %s "$m"; exit {_FAULT}; }}'
    run = "files | LC_ALL=C.UTF-8 xargs -0 -r"
    ripgrep = (
        f"m=$(rg --no-config -q -e {rust} /dev/null 2>&1); {check}; "
        f"search() {{ {run} rg --no-config --no-messages --no-heading --color=never -j1 -aHn0 -E none "
        f'"$@" -e {rust} -- 2>/dev/null; }}'
    )
    if pattern.posix is None:
        grep = f"echo 'This pattern needs ripgrep, which the sandbox does not have.'; exit {_FAULT}"
    else:
        posix = f"{case} -e {shlex.quote(pattern.posix)}"
        # grep without -Z (BusyBox) cannot set the path apart, so its matching files are searched one by one.
        grep = (
            f"m=$(echo | grep -E {posix} 2>&1 >/dev/null); {check}; grep -EZ {posix} /dev/null >/dev/null 2>&1; "
            f'if [ $? -lt 2 ]; then search() {{ {run} grep -EaHnZ "$@" {posix} -- 2>/dev/null; }}; '
            f"else search() {{ {run} grep -El {posix} -- 2>/dev/null | while IFS= read -r f; do "
            f'grep -En "$@" {posix} -- "$f" 2>/dev/null | tr "\\0" "\\1" | '
            """while IFS= read -r l; do printf '%s\\1%s\\n' "$f" "$l"; done; done; }; fi"""
        )
    return f"if type rg >/dev/null 2>&1; then {ripgrep}; else {grep}; fi"


def _listing(mode: str, offset: int, limit: int, around: int) -> str:
    if mode == "files_only":
        return rf"search | {_TEXT_ONLY} | cut -d $'\1' -f 1 | uniq | {_window(offset, limit)}"
    if mode == "count":
        return rf"search | {_TEXT_ONLY} | cut -d $'\1' -f 1 | uniq -c | {_window(offset, limit)}"
    if not around:
        return f"search | {_TEXT_ONLY} | {_window(offset, limit)}"
    rows = (offset + limit) * (2 * around + 1)
    return (
        rf"search -C {around} | {_TEXT_ONLY} | sed $'/\1/!d' | head -n {rows}; "
        f"search | {_TEXT_ONLY} | head -n {COUNT_LIMIT} | wc -l"
    )


def _window(offset: int, limit: int) -> str:
    """Some of the lines, then the number of all of them."""
    return f"head -n {COUNT_LIMIT} | sed -n -e '{offset + 1},{offset + limit}p' -e '$='"


# ---- its output


def _rows(result: ExecResult) -> tuple[list[bytes], int]:
    """The listed rows, and the number of all, which the script prints last."""
    output = result.output
    *rows, last = output.rstrip(b"\n").split(b"\n")
    if result.dropped:
        rows = output[:OUTPUT_HEAD].split(b"\n")[:-1]  # what was lost is asked for again by offset
    return rows, int(last or b"0")


def _path(raw: bytes) -> str:
    return decode(raw)[0].removeprefix("./")


def _matches(rows: list[bytes], around: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lines: dict[tuple[bytes, int], str] = {}
    places: list[tuple[bytes, int]] = []
    for row in rows:
        path, _, rest = row.partition(b"\1")
        parts = _LINE.match(rest)
        if parts is None:
            continue
        text = parts[3] if len(row) < ROW_BYTES else without_torn_end(parts[3])
        place = (path, int(parts[1]))
        lines[place] = bounded(decode(text.removesuffix(b"\r"))[0], LINE_LIMIT)
        if parts[2] == b":":
            places.append(place)
    for path, number in places:
        match: dict[str, Any] = {"path": _path(path), "line": number, "content": lines[path, number]}
        if around:
            for key, numbers in (
                ("before", range(number - around, number)),
                ("after", range(number + 1, number + 1 + around)),
            ):
                match[key] = [lines[path, near] for near in numbers if (path, near) in lines]
        found.append(match)
    return found


# ---- the tool


def _access(arguments: dict[str, Any]) -> Access:
    return Access(("sandbox", "files"))


SEARCH_FILES = Tool(
    schema=ToolSchema(
        name="search_files",
        description=(
            "Search text files line by line with a regular expression (target=content), or find files by a glob such "
            "as *.py or src/**/*.ts (target=files). Results come in path order; .git is left out."
        ),
        parameters={
            "type": "object",
            "properties": {
                "pattern": {
                    "type": "string",
                    "minLength": 1,
                    "description": "Regular expression (no look-around), or the glob of target=files.",
                },
                "target": {"type": "string", "enum": ["content", "files"], "default": "content"},
                "path": {"type": "string", "default": ".", "description": "Folder or file to search."},
                "file_glob": {"type": "string", "description": "Search only files that fit, such as *.{c,h}."},
                "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50},
                "offset": {"type": "integer", "minimum": 0, "default": 0, "description": "Results to skip."},
                "output_mode": {
                    "type": "string",
                    "enum": ["content", "files_only", "count"],
                    "default": "content",
                    "description": "Matching lines, the files that have any, or their number in each file.",
                },
                "context": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 20,
                    "default": 0,
                    "description": "Lines shown before and after each match.",
                },
            },
            "required": ["pattern"],
            "additionalProperties": False,
        },
    ),
    toolset="file",
    run=run_search,
    access=_access,
)
