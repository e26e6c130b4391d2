"""Reads a JSONL prompt file: every row becomes a task, or is refused with its line number and the reason.

Lines end at byte 0x0A only, whatever the platform and locale. Values that are only carried through keep their exact
digits, because they are never decoded: `msgspec.Raw` checks them and passes the bytes on.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gristmill.errors import SetupError
from gristmill.prompt import read_prompt, type_name
from gristmill.task import Dataset, RefusedRow, RowRefused, Task, task_digest

MAX_ROW_BYTES = 16 * 1024 * 1024  # of one line; longer ones are refused unread
MAX_DEPTH = 200  # levels of nested lists and objects in the fields that are carried through
MAX_DIGITS = 300  # of one number: more overflow the double that most JSON readers use
PROMPT_ALIASES = ("instruction", "problem_statement", "question", "input", "task", "text", "messages")

_MAX_REASON = 500  # characters
_SHOWN_KEYS = 20
_MEND = (
    """Write one JSON object a line, like {"prompt": "List the files"}; jq -c '.[]' makes such lines of a JSON array."""
)
_OTHER_FORMATS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)

_decode_row = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?\b(?:NaN|Infinity)\b|[\[{]|[\]}]|[0-9]{%d}' % (MAX_DIGITS + 1), re.S)
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.S
)
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def read_tasks(path: str, *, prompt_field: str = "prompt", max_samples: int | None = None) -> Dataset:
    """Read a JSONL prompt file.

    Args:
        path: the file; UTF-8, with or without a byte order mark.
        prompt_field: the key that holds the prompt; `a.b.0` leads into objects and lists where no key has that name.
        max_samples: read only the first so many rows, usable or not; blank lines do not count.

    Raises:
        SetupError: the file is missing, is not UTF-8, or has no usable row.
    """
    tasks: list[Task] = []
    refused: list[RefusedRow] = []
    rows = _Rows(prompt_field)
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            lines = _lines(file, path, digest.update)
            for index, (number, line) in enumerate(islice(lines, max_samples)):
                try:
                    tasks.append(rows.read(index, number, line))
                except RowRefused as error:
                    refused.append(RefusedRow(index=index, line=number, reason=str(error)[:_MAX_REASON]))
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise SetupError(
            f"Cannot read the dataset {path}: {error.strerror}.", "Give a file with --dataset_file."
        ) from None
    if not tasks:
        raise _nothing_usable(path, refused, rows.keys_without_prompt)
    return Dataset(path=path, digest=digest.hexdigest(), tasks=tuple(tasks), refused=tuple(refused))


def _lines(file: BinaryIO, path: str, seen: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
    """Physical line numbers and lines, blank ones left out; one beyond `MAX_ROW_BYTES` comes cut to a byte more."""
    number = offset = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        seen(line)
        start, offset = offset, offset + len(line)
        if len(line) > MAX_ROW_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_ROW_BYTES)
                seen(rest)
                offset += len(rest)
        elif not line.isascii():
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start + error.start, number, line if start == 0 else b"") from None
        line = line.removeprefix(codecs.BOM_UTF8)  # of any line: files that begin with one get concatenated
        if line and not line.isspace():
            yield number, line


def _not_utf8(path: str, offset: int, number: int, head: bytes) -> SetupError:
    found = next((name for mark, name in _OTHER_FORMATS if head.startswith(mark)), "")
    message = f"{path} is not UTF-8, which is expected: see byte offset {offset}, in line {number}."
    if not found:
        return SetupError(message, "Convert it, for example with iconv -f LATIN1 -t UTF-8.")
    return SetupError(f"{message} It looks like {found}.", f"Convert it, for example with iconv -f {found} -t UTF-8.")


def _nothing_usable(path: str, refused: list[RefusedRow], keys: list[str]) -> SetupError:
    if not refused:
        return SetupError(f"{path} holds no rows.", _MEND)
    first = refused[0]
    message = (
        f"No usable row in {path}: all {len(refused)} refused, the first (line {first.line}) because {first.reason}."
    )
    if keys:
        return SetupError(f"{message} Keys seen: {_shown(keys)}.", _how_to_map(keys))
    return SetupError(message, _MEND)


class _Rows:
    """Turns lines into tasks, and counts the copies."""

    def __init__(self, prompt_field: str) -> None:
        self.keys_without_prompt: list[str] = []
        self._prompt_field = prompt_field
        self._copies: dict[str, int] = {}
        self._no_files: dict[str, str] = {}  # one for all tasks: a million empty ones are 64 MB

    def read(self, index: int, number: int, line: bytes) -> Task:
        """The task of one line. Raises `RowRefused`."""
        row = _parse(line)
        prompt = self._take_prompt(row)
        text, history = read_prompt(prompt)
        row_id = _read_id(row.pop("id", None))
        fields = _take_fields(row)
        extra = _carried(msgspec.json.encode(row)) if row else "{}"
        digest = task_digest({"prompt": prompt, **fields})
        copy = self._copies[digest] = self._copies.get(digest, 0) + 1
        fields.setdefault("files", self._no_files)
        return Task(
            index=index,
            line=number,
            key=digest if copy == 1 else f"{digest}#{copy}",
            text=text,
            history=history,
            row_id=row_id,
            extra=extra,
            **fields,
        )

    def _take_prompt(self, row: dict[str, msgspec.Raw]) -> Any:
        raw = row.pop(self._prompt_field, None)
        if raw is not None:
            return _value(raw, self._prompt_field)
        try:
            return _follow(row, self._prompt_field.split("."))
        except LookupError:
            keys = list(row)
            new = [key for key in keys[:_SHOWN_KEYS] if key not in self.keys_without_prompt]
            self.keys_without_prompt += new[: _SHOWN_KEYS - len(self.keys_without_prompt)]
            seen = f"its keys are {_shown(keys)}" if keys else "it has no keys"
            raise RowRefused(f"it has no '{self._prompt_field}'; {seen}. {_how_to_map(keys)}".rstrip(".")) from None


def _parse(line: bytes) -> dict[str, msgspec.Raw]:
    if len(line) > MAX_ROW_BYTES:
        raise RowRefused(f"it is longer than {MAX_ROW_BYTES // 1024**2} MiB, the limit of one row")
    try:
        return _decode_row(line)
    except RecursionError:
        raise RowRefused(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.ValidationError as error:
        kind = str(error).rpartition("got ")[2].strip("`")
        raise RowRefused(f"it is not an object but {kind}") from None
    except msgspec.DecodeError as error:
        mended = _mend(line)
        if mended == line:
            raise RowRefused(f"it is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    return _parse(mended)  # at most once more: mending twice changes nothing


def _mend(line: bytes) -> bytes:
    """Two slips of common JSON writers put right: lone surrogates become U+FFFD, NaN and Infinity become null."""
    return _TOKEN.sub(_mend_token, line)


def _mend_token(match: re.Match[bytes]) -> bytes:
    token = match[0]
    if token[:1] == b'"':
        return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], token)
    return b"null" if token.endswith((b"NaN", b"Infinity")) else token


def _value(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise RowRefused(f"'{name}' is nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.ValidationError:
        raise RowRefused(f"'{name}' holds a number that is out of range") from None


def _follow(row: dict[str, msgspec.Raw], path: list[str]) -> Any:
    """The value at a path of keys and list positions; raises `LookupError` where it leads nowhere."""
    value = _value(row[path[0]], path[0])
    for step in path[1:]:
        if isinstance(value, list) and step.isdecimal():
            value = value[int(step)]
        elif isinstance(value, dict):
            value = value[step]
        else:
            raise LookupError(step)
    return value


def _read_id(raw: msgspec.Raw | None) -> str:
    if raw is None:
        return ""
    text = bytes(raw)
    if text.startswith(b'"'):
        return str(msgspec.json.decode(text))
    return "" if text == b"null" else _carried(text)


def _take_fields(row: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """The fields of `Task` that the row sets; null and empty ones count as not set."""
    if _unset(row.get("image")) and "docker_image" in row:
        row["image"] = row.pop("docker_image")
    fields: dict[str, Any] = {}
    for name, read in _FIELDS.items():
        if name in row:
            raw = row.pop(name)
            if not _unset(raw):
                value = read(name, _value(raw, name))
                if value or name == "toolsets":  # an empty list of toolsets is a wish: no tools
                    fields[name] = value
    return fields


def _unset(raw: msgspec.Raw | None) -> bool:
    return raw is None or bytes(raw) in (b"null", b'""')


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowRefused(f"'{name}' is {type_name(value)}; it must be text")
    if name != "system" and "\0" in value:
        raise RowRefused(f"'{name}' contains a NUL character")
    return value


def _read_toolsets(name: str, value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise RowRefused(f"'{name}' is {type_name(value)}; it must be a list of names")
    for item in names:
        if not isinstance(item, str):
            raise RowRefused(f"'{name}' holds {type_name(item)}; it must be a list of names")
        if not item.strip():
            raise RowRefused(f"'{name}' holds an empty name")
    return tuple(dict.fromkeys(item.strip() for item in names))


def _read_followups(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RowRefused(f"'{name}' is {type_name(value)}; it must be a list of text")
    for item in value:
        if not isinstance(item, str):
            raise RowRefused(f"'{name}' holds {type_name(item)}; it must be a list of text")
        if not item or item.isspace():
            raise RowRefused(f"'{name}' holds an empty prompt")
    return tuple(value)


def _read_files(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RowRefused(f"'{name}' is {type_name(value)}; it must be an object of paths and texts")
    files: dict[str, str] = {}
    for path, text in value.items():
        if text is None:  # loaders fill the paths of other rows with null
            continue
        if not isinstance(text, str):
            raise RowRefused(f"'{name}' holds {type_name(text)} for {path!r}; it must be text")
        if not path or path.startswith("/") or path.endswith("/") or ".." in path.split("/") or "\0" in path:
            raise RowRefused(
                f"'{name}' holds the path {path!r}; it must be relative, without '..' and NUL, and name a file"
            )
        files[path] = text
    return files


_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "image": _read_text,
    "cwd": _read_text,
    "toolsets": _read_toolsets,
    "system": _read_text,
    "files": _read_files,
    "setup": _read_text,
    "followups": _read_followups,
    "verify": _read_text,
}


def _carried(value: bytes) -> str:
    """A value as compact text, its numbers exactly as written; too deep and too long ones are refused."""
    text = msgspec.json.format(value, indent=-1)
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and (len(text) <= MAX_DIGITS or not _LONG_NUMBER.search(text)):
        return text.decode()
    depth = 0
    for token in _TOKEN.finditer(text):
        kind = token[0][:1]
        if kind.isdigit():
            raise RowRefused(f"it holds a number of more than {MAX_DIGITS} digits")
        depth += (kind in b"[{") - (kind in b"]}")
        if depth > MAX_DEPTH:
            raise RowRefused(f"it is nested deeper than {MAX_DEPTH} levels")
    return text.decode()


def _how_to_map(keys: list[str]) -> str:
    likely = next((alias for alias in PROMPT_ALIASES if alias in keys), "KEY")
    return f"If another key holds the prompt, name it: --prompt_field {likely}."


def _shown(keys: list[str]) -> str:
    names = [key[:40] if key.isprintable() else ascii(key[:40]) for key in keys[:_SHOWN_KEYS]]
    return ", ".join(names) + (", …" if len(keys) > _SHOWN_KEYS else "")
