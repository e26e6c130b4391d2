"""Run directories made without running anything: tasks, ended sessions, a store with rows in it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from gristmill.config import ModelConfig, RunConfig
from gristmill.quality.filters import parse_filters
from gristmill.run.layout import Layout
from gristmill.run.store import RunStore
from gristmill.session.spec import Finished
from gristmill.task import Dataset, Task, task_digest
from gristmill.trajectory import (
    Failure,
    Metadata,
    ReasoningStats,
    Row,
    RowCall,
    Tombstone,
    Turn,
    encode_failure,
    encode_row,
    encode_tombstone,
    timestamp,
    tool_columns,
)
from gristmill.types import ErrorInfo, Outcome, Usage

TOOLS = ("terminal", "process", "read_file", "write_file")


def tasks(prompts: Iterable[str]) -> tuple[Task, ...]:
    """A dataset's tasks, copies numbered as the reading of a dataset does."""
    copies: dict[str, int] = {}
    made = []
    for index, text in enumerate(prompts):
        digest = task_digest({"prompt": text})
        copy = copies[digest] = copies.get(digest, 0) + 1
        made.append(Task(index=index, line=index + 1, key=digest if copy == 1 else f"{digest}#{copy}", text=text))
    return tuple(made)


def dataset(prompts: Sequence[str], refused: int = 0) -> Dataset:
    from gristmill.task import RefusedRow

    digest = hashlib.sha256("\n".join(prompts).encode("utf-8", "replace")).hexdigest()
    rows = tuple(RefusedRow(index=len(prompts) + n, line=1, reason="no prompt") for n in range(refused))
    return Dataset(path="prompts.jsonl", digest=digest, tasks=tasks(prompts), refused=rows)


def config(root: Path, **changes: Any) -> RunConfig:
    model = ModelConfig(name=changes.pop("model", "m"), base_url="http://127.0.0.1:1/v1")
    values = {"dataset_file": "prompts.jsonl", "batch_size": 2, "run_name": "r", "output_dir": str(root), "seed": 7}
    return RunConfig(model=model, **(values | changes))


def open_store(root: Path, prompts: Sequence[str], **options: Any) -> RunStore:
    """The store of a run of these prompts; `resume` and `allow_changes` as in `RunStore.open`, others are settings."""
    given = {name: options.pop(name) for name in ("resume", "allow_changes") if name in options}
    filters = parse_filters(options.pop("filters", "no_reasoning,unknown_tool"))
    tools = options.pop("tools", TOOLS)
    refused = options.pop("refused", 0)
    return RunStore.open(
        config(root, **options), dataset(prompts, refused), known_tools=tools, filters=filters, **given
    )


def row(task: Task, batch: int = 0, **changes: Any) -> Row:
    """A plausible row; `calls` are (tool, succeeded) pairs, `text` the answer, `tools` the known ones."""
    calls: Sequence[tuple[str, bool]] = changes.pop("calls", (("terminal", True),))
    known = changes.pop("tools", TOOLS)
    sample = changes.pop("sample", 0)
    text = changes.pop("text", "done")
    counts: dict[str, list[int]] = {}
    for name, good in calls:
        entry = counts.setdefault(name, [0, 0, 0])
        entry[0] += 1
        entry[1 if good else 2] += 1
    stats, errors = tool_columns(known, {name: (c[0], c[1], c[2]) for name, c in counts.items()})
    turns = [
        Turn(speaker="system", value="tools", tool_calls=[]),
        Turn(speaker="human", value=task.text, tool_calls=[]),
    ]
    if calls:
        listed = [RowCall(id=f"c{n}", name=name, arguments="{}") for n, (name, _) in enumerate(calls)]
        turns.append(Turn(speaker="gpt", value="<think>\nt\n</think>\n", tool_calls=listed))
        turns.append(Turn(speaker="tool", value="results", tool_calls=[]))
    turns.append(Turn(speaker="gpt", value=f"<think>\nt\n</think>\n{text}", tool_calls=[]))
    answers = 1 + bool(calls)
    outcome = Outcome(changes.pop("outcome", "completed"))
    values: dict[str, Any] = {
        "prompt_index": task.index,
        "conversations": turns,
        "metadata": Metadata(
            batch_num=batch,
            timestamp=timestamp(),
            model="m",
            row_id=task.row_id,
            row=task.extra,
            task_key=task.key,
            sample=sample,
            seed=7,
        ),
        "completed": outcome.completed,
        "partial": outcome.partial,
        "outcome": str(outcome),
        "api_calls": answers,
        "toolsets_used": ["terminal", "file"],
        "tool_stats": stats,
        "tool_error_counts": errors,
        "reasoning_stats": ReasoningStats(
            total_assistant_turns=answers, turns_with_reasoning=answers, turns_without_reasoning=0
        ),
        "usage": Usage(prompt_tokens=100, completion_tokens=20, cost_usd=0.25),
        "duration_seconds": 1.5,
    }
    return Row(**(values | changes))


def kept(task: Task, batch: int = 0, **changes: Any) -> Finished:
    """A session that became a trajectory."""
    made = row(task, batch, **changes)
    return _finished(task, batch, "kept", made.outcome, encode_row(made), sample=made.metadata.sample)


def discarded(task: Task, batch: int = 0, *, sample: int = 0, by: str = "no_reasoning") -> Finished:
    """A session that a filter discarded."""
    line = Tombstone(
        prompt_index=task.index,
        discarded=by,
        prompt=task.text,
        task_key=task.key,
        sample=sample,
        outcome="completed",
        batch_num=batch,
        usage=Usage(prompt_tokens=10, completion_tokens=2, cost_usd=0.5),
        api_calls=1,
    )
    return _finished(task, batch, "discarded", "completed", encode_tombstone(line), sample=sample)


def failed(task: Task, batch: int = 0, *, sample: int = 0, attempt: int = 1, status: int = 502) -> Finished:
    """A session that failed."""
    line = Failure(
        prompt_index=task.index,
        outcome="model_error",
        error=ErrorInfo(type="transient", message="bad gateway", status=status),
        attempt=attempt,
        prompt=task.text,
        task_key=task.key,
        sample=sample,
        batch_num=batch,
        usage=Usage(prompt_tokens=1, cost_usd=0.125),
    )
    return _finished(task, batch, "failed", "model_error", encode_failure(line), sample=sample, attempt=attempt)


def _finished(task: Task, batch: int, state: Any, outcome: str, line: bytes, **values: Any) -> Finished:
    values = {"sample": 0, "attempt": 1} | values
    record = {"prompt_index": task.index, "state": state, "text": "x" * 200, **values}
    return Finished(
        prompt_index=task.index,
        task_key=task.key,
        batch=batch,
        state=state,
        outcome=outcome,
        row=line,
        record=zstandard.ZstdCompressor().compress(msgspec.json.encode(record)),
        **values,
    )


async def append_all(store: RunStore, sessions: Iterable[Finished]) -> None:
    await asyncio.gather(*(store.append(session) for session in sessions))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def merged(root: Path, name: str = "r") -> list[dict[str, Any]]:
    return lines(Layout(root / name).trajectories)


def statistics(root: Path, name: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Layout(root / name).statistics.read_bytes())
    return found


def texts(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The prompts of decoded rows."""
    return [next(t["value"] for t in r["conversations"] if t["from"] == "human") for r in rows]
