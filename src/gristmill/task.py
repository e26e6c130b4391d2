"""A task is one usable dataset row: one unit of work, named by its content. `dataset.read_tasks` makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from gristmill.types import Message


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One usable dataset row.

    `index` counts usable and refused rows alike from 0 in file order (blank lines do not count); `line` is the physical
    line number from 1. `key` is the digest of the exact prompt and of the fields that change the task; the second copy
    of a row has `#2` behind it, and so on. `text` is the prompt as the `human` turn shows it. `history` holds the
    messages of a prompt given as chat messages, the last user message included, or the one user message of a prompt
    given as content parts; it is empty for a plain text. `toolsets` is None where they are to be drawn. `extra` is the
    row's other fields as one JSON text.
    """

    index: int
    line: int
    key: str
    text: str
    history: tuple[Message, ...] = ()
    row_id: str = ""
    image: str = ""
    cwd: str = ""
    toolsets: tuple[str, ...] | None = None
    system: str = ""
    files: dict[str, str] = {}
    setup: str = ""
    followups: tuple[str, ...] = ()
    verify: str = ""
    extra: str = "{}"

    @property
    def digest(self) -> str:
        """The key without the number of the copy."""
        return self.key.partition("#")[0]


class RefusedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that cannot be run: where it stands and why."""

    index: int
    line: int
    reason: str


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt file holds. `digest` is of the file's bytes; `rows` counts usable and refused ones."""

    path: str
    digest: str
    tasks: tuple[Task, ...]
    refused: tuple[RefusedRow, ...]

    @property
    def rows(self) -> int:
        """All rows that were read, blank lines left out."""
        return len(self.tasks) + len(self.refused)


class RowRefused(ValueError):
    """Why one row cannot be run, in a sentence; becomes a `RefusedRow`, never leaves the reading."""


def task_digest(fields: Mapping[str, Any]) -> str:
    """The digest of the fields that make a task what it is, as 32 hex digits.

    It is BLAKE2b (128 bits) of the fields as JSON in fixed form: sorted keys, no white space, UTF-8. Fields that a row
    does not set must be left out, so that a field of a later version changes no key of an earlier one.
    """
    return hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).hexdigest()


def text_digest(text: str) -> str:
    """The digest of a row that has nothing but this prompt; finds rows of the reference, which carry no key.

    Lone surrogates count as U+FFFD, as they do when a dataset is read.
    """
    try:
        return task_digest({"prompt": text})
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return task_digest({"prompt": whole})
