"""An ended session becomes what is stored of it: one line for the batch file, one compressed session record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zstandard
from msgspec.structs import replace

from gristmill.conversation import to_conversation
from gristmill.quality.base import ActiveFilter
from gristmill.session.record import SessionRecord, row_system
from gristmill.session.spec import Finished, SessionSpec, State
from gristmill.trajectory import (
    Counts,
    Failure,
    Metadata,
    ReasoningStats,
    Row,
    Tombstone,
    encode_failure,
    encode_row,
    encode_tombstone,
    mend,
    timestamp,
    tool_columns,
    turns_of,
)
from gristmill.types import ErrorInfo, Message, Outcome

RECORD_VERSION = 1


@dataclass(frozen=True)
class RowShape:
    """What all rows of a run share: the model's name, the columns of `tool_stats`, the sandbox's name."""

    model: str
    known_tools: tuple[str, ...]
    sandbox: str = ""
    compressor: zstandard.ZstdCompressor = field(default_factory=lambda: zstandard.ZstdCompressor(level=3))


def finish(record: SessionRecord, shape: RowShape, filters: tuple[ActiveFilter, ...]) -> Finished:
    """Encode an ended session; `filters` are those that discard a session as it ends."""
    spec = record.spec
    reason = ""
    if record.outcome.kept:
        row = make_row(record, shape)
        state: State = "kept"
        name, reason = _discarded(row, shape, filters)
        if name:
            state, line = "discarded", _tombstone(record, name, reason)
        else:
            line = encode_row(row)
    else:
        state, reason = "failed", record.reason or str(record.outcome)
        line = _failure(record)
    return Finished(
        prompt_index=spec.task.index,
        task_key=spec.task.key,
        sample=spec.sample,
        attempt=spec.attempt,
        batch=spec.batch,
        state=state,
        outcome=str(record.outcome),
        row=line,
        record=encode_record(record, shape, state),
        reason=mend(reason),
        fatal=mend(record.reason) if record.fatal else "",
        partial=record.outcome.partial,
        prompt_tokens=record.usage.prompt_tokens,
        completion_tokens=record.usage.completion_tokens,
        cost_usd=record.usage.cost_usd,
        cost_known=record.usage.cost_known,
        turns=record.api_calls,
        seconds=record.seconds,
    )


def make_row(record: SessionRecord, shape: RowShape) -> Row:
    """The trajectory row of a session."""
    spec, task = record.spec, record.spec.task
    stats, errors = tool_columns(shape.known_tools, tool_counts(record))
    return Row(
        prompt_index=task.index,
        conversations=turns_of(to_conversation(record.messages, record.tools, row_system(spec))),
        metadata=Metadata(
            batch_num=spec.batch,
            timestamp=timestamp(),
            model=shape.model,
            row_id=task.row_id,
            row=task.extra,
            task_key=task.key,
            sample=spec.sample,
            seed=spec.seed,
        ),
        completed=record.outcome.completed,
        partial=record.outcome.partial,
        outcome=str(record.outcome),
        api_calls=record.api_calls,
        toolsets_used=list(spec.toolsets),
        tool_stats=stats,
        tool_error_counts=errors,
        reasoning_stats=reasoning_stats(record),
        usage=record.usage,
        duration_seconds=record.seconds,
        graded=record.graded,
        reward=record.reward,
    )


def tool_counts(record: SessionRecord) -> Mapping[str, Counts]:
    """Calls, successes and failures by the name that was called; made-up names stand here too."""
    counts: dict[str, list[int]] = {}
    for result in record.results:
        entry = counts.setdefault(result.name, [0, 0, 0])
        entry[0] += 1
        entry[1 if result.ok else 2] += 1
    return {name: (entry[0], entry[1], entry[2]) for name, entry in counts.items()}


def reasoning_stats(record: SessionRecord) -> ReasoningStats:
    """How many answers came with reasoning; hidden reasoning counts, for the model did reason."""
    answers = [m for m in record.messages if m.role == "assistant"][_given_answers(record.spec) :]
    reasoned = sum(1 for m in answers if m.hidden_reasoning or m.reasoning.strip())
    return ReasoningStats(
        total_assistant_turns=len(answers),
        turns_with_reasoning=reasoned,
        turns_without_reasoning=len(answers) - reasoned,
    )


def _given_answers(spec: SessionSpec) -> int:
    """Assistant messages that the dataset row brought along; the model did not write them."""
    return sum(1 for message in spec.task.history if message.role == "assistant")


def encode_record(record: SessionRecord, shape: RowShape, state: State) -> bytes:
    """The lossless session record as one zstd frame of one JSON line."""
    spec = record.spec
    data: dict[str, Any] = {
        "version": RECORD_VERSION,
        "prompt_index": spec.task.index,
        "task_key": spec.task.key,
        "sample": spec.sample,
        "attempt": spec.attempt,
        "batch": spec.batch,
        "state": state,
        "outcome": record.outcome,
        "reason": record.reason,
        "error": record.error,
        "detail": record.detail,
        "model": shape.model,
        "sandbox": shape.sandbox,
        "seed": spec.seed,
        "toolsets": spec.toolsets,
        "probability": spec.probability,
        "started": record.started,
        "seconds": record.seconds,
        "api_calls": record.api_calls,
        "usage": record.usage,
        "graded": record.graded,
        "reward": record.reward,
        "task": spec.task,
        "tools": record.tools,
        "messages": record.messages,
        "turns": record.turns,
        "results": [_timing(result) for result in record.results],
        "failed_requests": record.failed_requests,
        "setup_output": record.setup_output,
        "verify_output": record.verify_output,
    }
    try:
        encoded = msgspec.json.encode(data)
    except (UnicodeEncodeError, TypeError):
        # A record that cannot be encoded is stored with replacements, never dropped.
        encoded = msgspec.json.encode(mend(msgspec.to_builtins(data, enc_hook=str)))
    except RecursionError:
        # An endpoint's own fields, nested so deeply that they can be read but not written a few levels deeper.
        data["messages"] = [_without_extra(message) for message in record.messages]
        data["turns"] = [
            replace(turn, reply=replace(turn.reply, raw={}, message=_without_extra(turn.reply.message)))
            for turn in record.turns
        ]
        encoded = msgspec.json.encode(mend(msgspec.to_builtins(data, enc_hook=str)))
    return shape.compressor.compress(encoded + b"\n")


def _without_extra(message: Message) -> Message:
    return replace(message, extra={})


def _timing(result: Any) -> dict[str, Any]:
    """A result without its text, which stands in the messages."""
    return {name: value for name, value in msgspec.structs.asdict(result).items() if name not in ("text", "arguments")}


def _discarded(row: Row, shape: RowShape, filters: tuple[ActiveFilter, ...]) -> tuple[str, str]:
    """The name and reason of the first filter that discards the session, empty where none does."""
    if not filters:
        return "", ""
    plain = msgspec.to_builtins(row)
    known = frozenset(shape.known_tools)
    for active in filters:
        if reason := active.filter.judge(plain, active.context(known)):
            return active.name, reason
    return "", ""


def _tombstone(record: SessionRecord, name: str, reason: str) -> bytes:
    spec = record.spec
    return encode_tombstone(
        Tombstone(
            prompt_index=spec.task.index,
            discarded=name,
            prompt=spec.task.text,
            task_key=spec.task.key,
            sample=spec.sample,
            reason=reason,
            outcome=str(record.outcome),
            attempt=spec.attempt,
            batch_num=spec.batch,
            timestamp=timestamp(),
            api_calls=record.api_calls,
            usage=record.usage,
            duration_seconds=record.seconds,
        )
    )


def _failure(record: SessionRecord) -> bytes:
    spec = record.spec
    return encode_failure(
        Failure(
            prompt_index=spec.task.index,
            outcome=str(record.outcome),
            error=record.error or ErrorInfo(type=str(record.outcome), message=record.reason),
            attempt=spec.attempt,
            prompt=spec.task.text,
            task_key=spec.task.key,
            sample=spec.sample,
            batch_num=spec.batch,
            timestamp=timestamp(),
            api_calls=record.api_calls,
            usage=record.usage,
            duration_seconds=record.seconds,
        )
    )


def lost_session(spec: SessionSpec, reason: str, shape: RowShape) -> Finished:
    """What is stored of a session of which nothing came back: its worker died with it, again and again."""
    record = SessionRecord(spec=spec, tools=(), messages=[], outcome=Outcome.INTERNAL_ERROR, reason=reason)
    record.error = ErrorInfo(type="worker_died", message=reason)
    return finish(record, shape, ())
