"""One line of a batch file: its schema, how it is encoded and how it is read back.

```
Row        a session that became a trajectory; the same line stands in trajectories.jsonl
Tombstone  a session that a filter discarded
Failure    a session that failed; its prompt is still owed
```

The schema is made for loaders that infer types from the first 10 MB of a file (Hugging Face `datasets`): every row has
every key with the same type, whatever the session did. So nothing is null, floats are written as floats and are finite,
integers fit 64 bits, text holds no lone surrogate, times always have microseconds, and free-form values are JSON text.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from gristmill.types import ErrorInfo, Usage

INT_LIMIT = 2**63 - 1  # the largest integer that loaders take

# A count, its successes, its failures.
Counts = tuple[int, int, int]


class RowCall(msgspec.Struct, kw_only=True):
    """One tool call of a turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, kw_only=True):
    """One turn of the conversation; `speaker` is system, human, gpt or tool."""

    speaker: str = msgspec.field(name="from")
    value: str
    tool_calls: list[RowCall]


class Metadata(msgspec.Struct, kw_only=True):
    """Where a row comes from. `row` holds the dataset row's other fields as one JSON text."""

    batch_num: int
    timestamp: str
    model: str
    row_id: str = ""
    row: str = "{}"
    task_key: str = ""
    sample: int = 0
    seed: int = 0


class ToolCount(msgspec.Struct, kw_only=True):
    """Calls of one tool."""

    count: int = 0
    success: int = 0
    failure: int = 0


class ReasoningStats(msgspec.Struct, kw_only=True):
    """How many of the model's turns came with reasoning, readable or hidden."""

    total_assistant_turns: int = 0
    turns_with_reasoning: int = 0
    turns_without_reasoning: int = 0


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One trajectory. `tool_stats` and `tool_error_counts` hold all known tools in the run's order (`tool_columns`)."""

    prompt_index: int
    conversations: list[Turn]
    metadata: Metadata
    completed: bool
    partial: bool
    outcome: str
    api_calls: int
    toolsets_used: list[str]
    tool_stats: dict[str, ToolCount]
    tool_error_counts: dict[str, int]
    reasoning_stats: ReasoningStats
    usage: Usage
    duration_seconds: float
    graded: bool = False
    reward: float = 0.0


class Tombstone(msgspec.Struct, kw_only=True):
    """Stands where a filter discarded a session. `discarded` is the filter's name, `reason` what it said.

    The session's usage is kept here, since it was paid for.
    """

    prompt_index: int
    discarded: str
    prompt: str
    task_key: str
    sample: int
    reason: str = ""
    outcome: str = ""
    attempt: int = 1
    batch_num: int = 0
    timestamp: str = ""
    api_calls: int = 0
    usage: Usage = Usage()
    duration_seconds: float = 0.0


class Failure(msgspec.Struct, kw_only=True):
    """Stands where a session failed; `attempt` counts from 1 over all invocations."""

    prompt_index: int
    failed: bool = True
    outcome: str
    error: ErrorInfo
    attempt: int
    prompt: str
    task_key: str
    sample: int
    batch_num: int = 0
    timestamp: str = ""
    api_calls: int = 0
    usage: Usage = Usage()
    duration_seconds: float = 0.0


_ENCODER = msgspec.json.Encoder()


def timestamp(at: datetime.datetime | None = None) -> str:
    """ISO 8601 with microseconds and offset, always: loaders take whole seconds for another type. Default: now."""
    return (at or datetime.datetime.now()).astimezone().isoformat(timespec="microseconds")


def turns_of(conversation: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns of a conversation given as plain `{from, value, tool_calls}` objects."""
    return msgspec.convert(conversation, list[Turn])


def tool_columns(tools: Iterable[str], counts: Mapping[str, Counts]) -> tuple[dict[str, ToolCount], dict[str, int]]:
    """`tool_stats` and `tool_error_counts` over all known tools in their order; names beyond them get no column."""
    stats = {}
    for name in tools:
        count, success, failure = counts.get(name, (0, 0, 0))
        stats[name] = ToolCount(count=count, success=success, failure=failure)
    return stats, {name: column.failure for name, column in stats.items()}


def encode_row(row: Row) -> bytes:
    """The line of a row, newline included. What JSON or a loader cannot hold is replaced; it never fails."""
    numbers = row.metadata
    if _fits((row.prompt_index, row.api_calls, numbers.batch_num, numbers.sample, numbers.seed), row.usage) and _finite(
        row.duration_seconds, row.reward
    ):
        try:
            return _ENCODER.encode(row) + b"\n"
        except (UnicodeEncodeError, TypeError):
            pass
    mended = conform(msgspec.to_builtins(row, enc_hook=str), tuple(row.tool_stats))
    return _ENCODER.encode(mended) + b"\n"


def encode_tombstone(line: Tombstone) -> bytes:
    """The line of a discarded session, newline included; it never fails."""
    return _encode_loose(line)


def encode_failure(line: Failure) -> bytes:
    """The line of a failed session, newline included; it never fails."""
    return _encode_loose(line)


def _encode_loose(line: Tombstone | Failure) -> bytes:
    if _fits((line.prompt_index, line.sample, line.attempt), line.usage) and _finite(line.duration_seconds):
        try:
            return _ENCODER.encode(line) + b"\n"
        except (UnicodeEncodeError, TypeError):
            pass
    return _ENCODER.encode(mend(msgspec.to_builtins(line, enc_hook=str))) + b"\n"


def decode_row(line: bytes) -> dict[str, Any]:
    """The object that a line holds. Lone surrogates become U+FFFD, NaN and infinities 0.0.

    Raises:
        ValueError: the line is not one JSON object; the text says why.
    """
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError as first:
        # The slow reader takes what Python's own writers make: lone surrogates as escapes, NaN, invalid UTF-8.
        try:
            data = mend(json.loads(line.decode("utf-8", "replace")))
        except (ValueError, RecursionError):
            raise ValueError(f"not JSON: {str(first)[:200]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"not an object but {type(data).__name__}")
    return data


def mend(value: Any) -> Any:
    """The value with lone surrogates as U+FFFD, numbers that are not finite as 0.0, and integers within 64 bits."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _int(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict):
        return {_text(k): mend(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mend(v) for v in value]
    return _text(str(value))


def conform(data: Mapping[str, Any], tools: Sequence[str]) -> Row:
    """A row in the schema of a run that knows these tools, from a decoded line that may lack keys or hold wrong types.

    A value of the wrong type is replaced by the schema's neutral one; keys that the schema lacks are left out.
    """
    meta = _object(data.get("metadata"))
    reasoning = _object(data.get("reasoning_stats"))
    usage = _object(data.get("usage"))
    stats = _object(data.get("tool_stats"))
    counts = {
        name: (_int(c.get("count")), _int(c.get("success")), _int(c.get("failure")))
        for name in tools
        if (c := _object(stats.get(name)))
    }
    tool_stats, error_counts = tool_columns(tools, counts)
    return Row(
        prompt_index=_int(data.get("prompt_index")),
        conversations=[_turn(turn) for turn in _list(data.get("conversations"))],
        metadata=Metadata(
            batch_num=_int(meta.get("batch_num")),
            timestamp=full_timestamp(meta.get("timestamp")),
            model=_text(meta.get("model")),
            row_id=_text(meta.get("row_id")),
            row=_text(meta.get("row")) or "{}",
            task_key=_text(meta.get("task_key")),
            sample=_int(meta.get("sample")),
            seed=_int(meta.get("seed")),
        ),
        completed=data.get("completed") is True,
        partial=data.get("partial") is True,
        outcome=_text(data.get("outcome")),
        api_calls=_int(data.get("api_calls")),
        toolsets_used=[_text(name) for name in _list(data.get("toolsets_used"))],
        tool_stats=tool_stats,
        tool_error_counts=error_counts,
        reasoning_stats=ReasoningStats(
            total_assistant_turns=_int(reasoning.get("total_assistant_turns")),
            turns_with_reasoning=_int(reasoning.get("turns_with_reasoning")),
            turns_without_reasoning=_int(reasoning.get("turns_without_reasoning")),
        ),
        usage=Usage(
            prompt_tokens=_int(usage.get("prompt_tokens")),
            completion_tokens=_int(usage.get("completion_tokens")),
            reasoning_tokens=_int(usage.get("reasoning_tokens")),
            cached_tokens=_int(usage.get("cached_tokens")),
            cost_usd=_float(usage.get("cost_usd")),
            cost_known=usage.get("cost_known") is True,
        ),
        duration_seconds=_float(data.get("duration_seconds")),
        graded=data.get("graded") is True,
        reward=_float(data.get("reward")),
    )


def full_timestamp(value: Any) -> str:
    """Any ISO time as one with microseconds and offset; a time without offset is local, what is none is 1970."""
    try:
        at = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        at = datetime.datetime.fromtimestamp(0, datetime.UTC)
    if at.tzinfo is not None:
        return at.isoformat(timespec="microseconds")
    return timestamp(at)


def _turn(turn: Any) -> Turn:
    turn = _object(turn)
    calls = [_object(call) for call in _list(turn.get("tool_calls"))]
    return Turn(
        speaker=_text(turn.get("from")),
        value=_text(turn.get("value")),
        tool_calls=[
            RowCall(
                id=_text(call.get("id")), name=_text(call.get("name")), arguments=_text(call.get("arguments")) or "{}"
            )
            for call in calls
        ],
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _int(value: Any) -> int:
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else 0
    return int(max(-INT_LIMIT, min(INT_LIMIT, value))) if isinstance(value, int) else 0


def _float(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _fits(numbers: Sequence[int], usage: Usage) -> bool:
    tokens = (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens, usage.cached_tokens)
    # A JSON writer does not check types, so what is not exactly an int or a float goes the slow way.
    return all(type(n) is int and -INT_LIMIT <= n <= INT_LIMIT for n in (*numbers, *tokens)) and _finite(usage.cost_usd)


def _finite(*numbers: float) -> bool:
    return all(type(n) is float and math.isfinite(n) for n in numbers)
