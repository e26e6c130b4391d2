"""The words that every floor uses: messages, calls, results, usage, outcomes. Plain data, no behaviour beyond sums."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Outcome(enum.StrEnum):
    """How a session ended; every session has exactly one."""

    COMPLETED = "completed"
    TURN_LIMIT = "turn_limit"
    INVALID_TOOL_CALLS = "invalid_tool_calls"
    OUTPUT_TRUNCATED = "output_truncated"
    EMPTY_ANSWER = "empty_answer"
    CONTEXT_OVERFLOW = "context_overflow"
    REFUSED = "refused"
    SESSION_TIMEOUT = "session_timeout"
    MODEL_ERROR = "model_error"
    SANDBOX_ERROR = "sandbox_error"
    SETUP_ERROR = "setup_error"
    INTERNAL_ERROR = "internal_error"
    BUDGET = "budget"
    INTERRUPTED = "interrupted"

    @property
    def kept(self) -> bool:
        """True where the session becomes a trajectory; False where the infrastructure failed and the prompt is owed."""
        return self not in _FAILED

    @property
    def completed(self) -> bool:
        """True only for a final answer."""
        return self is Outcome.COMPLETED

    @property
    def partial(self) -> bool:
        """True where the trajectory stops before the model meant it to."""
        return self in _PARTIAL


_FAILED = frozenset(
    {
        Outcome.MODEL_ERROR,
        Outcome.SANDBOX_ERROR,
        Outcome.SETUP_ERROR,
        Outcome.INTERNAL_ERROR,
        Outcome.BUDGET,
        Outcome.INTERRUPTED,
    }
)
_PARTIAL = frozenset(
    {
        Outcome.INVALID_TOOL_CALLS,
        Outcome.OUTPUT_TRUNCATED,
        Outcome.EMPTY_ANSWER,
        Outcome.CONTEXT_OVERFLOW,
        Outcome.SESSION_TIMEOUT,
    }
)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call as the model asked for it. `arguments` is the raw text that it sent, parsed only where the tool runs."""

    id: str
    name: str
    arguments: str = "{}"


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is offered to a model; `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call gave. `text` is what the model reads; `ok` and `error` were decided where the tool ran.

    `arguments` is the call's arguments as one JSON text in fixed form, or the raw text where it was refused.
    `seconds` is wall time.
    """

    call_id: str
    name: str
    text: str
    ok: bool
    error: str = ""
    arguments: str = "{}"
    seconds: float = 0.0
    known: bool = True  # False: no such tool was offered
    valid: bool = True  # False: unknown tool or refused arguments; nothing ran


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of the conversation with the model.

    `content` is text, or a list of content parts in the OpenAI form (user messages only).
    `reasoning` is the readable reasoning of an assistant message, found once, never doubled.
    `hidden_reasoning` says that the provider reasoned but shows it encrypted only.
    `extra` holds the provider's raw reasoning fields, sent back where the provider asks for them.
    """

    role: Role
    content: str | list[dict[str, Any]] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    hidden_reasoning: bool = False
    extra: dict[str, Any] = {}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and money of one call or of a sum of calls. `cost_known` is False where any part has no price."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    cost_known: bool = True

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
            cost_known=self.cost_known and other.cost_known,
        )

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a session failed: a stable `type`, a sentence, and the HTTP status (0 where there was none)."""

    type: str
    message: str
    status: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Resource limits of one sandbox; 0 is what its kind does without being asked, often no limit.

    Memory and disk in MiB, cpus in cores.
    """

    memory_mb: int = 0
    disk_mb: int = 0
    cpus: float = 0.0
    processes: int = 0
