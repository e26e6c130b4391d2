"""What goes into a session and what comes out of it, as plain data that crosses process borders (msgpack)."""

from __future__ import annotations

from typing import Literal

import msgspec

from gristmill.task import Task

State = Literal["kept", "discarded", "failed"]


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One session to run: a task, which sample of it, and what was drawn for it.

    `batch` is the number of the output file. `attempt` counts from 1 over all invocations of the run.
    `probability` is that of the drawn set of toolsets under the distribution, 1.0 where the row names them.
    """

    task: Task
    sample: int
    batch: int
    attempt: int
    toolsets: tuple[str, ...]
    probability: float
    seed: int  # the run's


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One ended session as the runner stores it; the worker has encoded everything.

    `row` is the complete line of the batch file, newline included. `record` is one zstd frame, the lossless session
    record. `reason` is why it was discarded or failed, in a sentence, empty for a kept one. `fatal` is an error that
    every other session of the run would meet too (a wrong key, say).
    """

    prompt_index: int
    task_key: str
    sample: int
    attempt: int
    batch: int
    state: State
    outcome: str
    row: bytes
    record: bytes
    reason: str = ""
    fatal: str = ""
    partial: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    cost_known: bool = True
    turns: int = 0
    seconds: float = 0.0
