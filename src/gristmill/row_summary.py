"""What statistics, resume and merge filters need of one line of a batch file, read without its long texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gristmill.trajectory import Counts, decode_row
from gristmill.types import ErrorInfo, Usage


class RowSummary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All that statistics and merge filters need of one line.

    `tools` holds the counts of called known tools, `unknown_calls` calls of names that are none. `attempt` is 0 and
    `usage` None where the line does not say. `discarded` is the name of the filter. Durations in seconds.
    """

    state: Literal["kept", "discarded", "failed"]
    outcome: str
    prompt_index: int
    task_key: str = ""
    sample: int = 0
    attempt: int = 0
    row_id: str = ""
    api_calls: int = 0
    toolsets_used: tuple[str, ...] = ()
    tools: dict[str, Counts] = {}
    unknown_calls: dict[str, int] = {}
    reasoning: Counts = (0, 0, 0)  # turns, with reasoning, without
    usage: Usage | None = None
    duration_seconds: float = 0.0
    graded: bool = False
    reward: float = 0.0
    discarded: str = ""
    error: ErrorInfo | None = None

    @property
    def calls(self) -> int:
        """All tool calls of the session."""
        return sum(count for count, _, _ in self.tools.values()) + sum(self.unknown_calls.values())


class _Call(msgspec.Struct):
    name: str = ""


class _Turn(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Metadata(msgspec.Struct):
    task_key: str = ""
    sample: int = 0
    row_id: str = ""


class _Count(msgspec.Struct):
    count: int = 0
    success: int = 0
    failure: int = 0


class _Reasoning(msgspec.Struct):
    total_assistant_turns: int = 0
    turns_with_reasoning: int = 0
    turns_without_reasoning: int = 0


class _Line(msgspec.Struct):
    """The keys of any line that are looked at; the text of the turns is skipped unread."""

    prompt_index: int = -1
    conversations: list[_Turn] | None = None
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    completed: bool = False
    partial: bool = False
    outcome: str = ""
    api_calls: int = 0
    toolsets_used: tuple[str, ...] = ()
    tool_stats: dict[str, _Count] = {}
    reasoning_stats: _Reasoning | None = None
    usage: Usage | None = None
    duration_seconds: float = 0.0
    graded: bool = False
    reward: float = 0.0
    discarded: str = ""
    failed: bool = False
    error: ErrorInfo | None = None
    attempt: int = 0
    task_key: str = ""
    sample: int = 0


_DECODER = msgspec.json.Decoder(_Line)
_FIELDS = msgspec.structs.fields(_Line)


def summarize(line: bytes | Mapping[str, Any]) -> RowSummary:
    """The summary of one line of a batch file, given as bytes or decoded; lines of the reference too.

    Raises:
        ValueError: it is no trajectory, discard or failure; the text says why.
    """
    if isinstance(line, bytes):
        try:
            found = _DECODER.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            found = _Line()
        if found.failed or found.discarded or (found.conversations is not None and found.reasoning_stats is not None):
            return _summary(found)
        line = decode_row(line)
    return _summary(_lenient(line))


def _lenient(data: Mapping[str, Any]) -> _Line:
    """A line with a value of the wrong type counts as one without it; what the reference leaves out is worked out."""
    found = _Line()
    for field in _FIELDS:
        try:
            setattr(found, field.name, msgspec.convert(data[field.name], field.type))
        except (KeyError, msgspec.ValidationError):
            continue
    turns = data.get("conversations")
    if isinstance(turns, list):
        found.conversations = found.conversations or []
        if found.reasoning_stats is None:
            thoughts = [_has_reasoning(t.get("value")) for t in turns if isinstance(t, dict) and t.get("from") == "gpt"]
            found.reasoning_stats = _Reasoning(len(thoughts), sum(thoughts), len(thoughts) - sum(thoughts))
    return found


def _has_reasoning(value: Any) -> bool:
    """True where the text of a `gpt` turn begins with a think block that is not empty."""
    if not isinstance(value, str) or not value.startswith("<think>"):
        return False
    return bool(value[len("<think>") :].partition("</think>")[0].strip())


def _summary(line: _Line) -> RowSummary:
    if line.discarded or line.failed:
        return RowSummary(
            state="discarded" if line.discarded else "failed",
            outcome=line.outcome,
            prompt_index=line.prompt_index,
            task_key=line.task_key,
            sample=line.sample,
            attempt=line.attempt,
            api_calls=line.api_calls,
            usage=line.usage,
            duration_seconds=line.duration_seconds,
            discarded=line.discarded,
            error=line.error,
        )
    if line.conversations is None:
        raise ValueError("neither a trajectory nor a discard nor a failure")
    unknown: dict[str, int] = {}
    for turn in line.conversations:
        for call in turn.tool_calls or ():
            if call.name not in line.tool_stats:
                unknown[call.name] = unknown.get(call.name, 0) + 1
    reasoning = line.reasoning_stats or _Reasoning()
    return RowSummary(
        state="kept",
        outcome=line.outcome or stated_outcome(line.completed, line.partial),
        prompt_index=line.prompt_index,
        task_key=line.metadata.task_key,
        sample=line.metadata.sample,
        row_id=line.metadata.row_id,
        api_calls=line.api_calls,
        toolsets_used=line.toolsets_used,
        tools={name: (c.count, c.success, c.failure) for name, c in line.tool_stats.items() if c.count},
        unknown_calls=unknown,
        reasoning=(
            reasoning.total_assistant_turns,
            reasoning.turns_with_reasoning,
            reasoning.turns_without_reasoning,
        ),
        usage=line.usage,
        duration_seconds=line.duration_seconds,
        graded=line.graded,
        reward=line.reward,
    )


def stated_outcome(completed: bool, partial: bool) -> str:
    """The outcome of a row of the reference, which states two booleans only."""
    return "completed" if completed else "partial" if partial else "turn_limit"
