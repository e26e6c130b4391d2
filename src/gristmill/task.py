"""Dataset rows become tasks: one unit of work each, named by its content."""

from __future__ import annotations

from typing import Any

import msgspec

from gristmill.types import Message


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One usable dataset row.

    `index` counts usable and refused rows alike from 0 in file order (blank lines do not count); `line` is the physical
    line number from 1. `key` is the digest of the exact prompt and of the fields that change the task; the second copy
    of a row has `#2` behind it, and so on. `text` is the prompt as the `human` turn shows it. `history` holds the
    messages of a prompt given as chat messages, the last user message included; it is empty for a plain text.
    `extra` is the row's other fields as one JSON text.
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
        """All rows that are not blank lines."""
        return len(self.tasks) + len(self.refused)


def read_tasks(path: str, *, prompt_field: str = "prompt", max_samples: int | None = None) -> Dataset:
    """Read a JSONL prompt file. Raises `errors.SetupError` where the file is missing, not UTF-8, or has no usable row."""
    raise NotImplementedError


def task_digest(fields: dict[str, Any]) -> str:
    """The digest of the fields that make a task what it is."""
    raise NotImplementedError
