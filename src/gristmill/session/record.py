"""What a session is given, and all that is known of it afterwards, as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gristmill.errors import SessionError
from gristmill.model.base import Attempt, Reply
from gristmill.session.spec import SessionSpec
from gristmill.types import ErrorInfo, Message, Outcome, ToolCall, ToolResult, ToolSchema, Usage


class Tools(Protocol):
    """What the loop needs of a toolbox (`tools.toolbox.Toolbox`)."""

    @property
    def schemas(self) -> tuple[ToolSchema, ...]: ...

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]: ...


class Gate(Protocol):
    """The run's budget. Its coroutines raise `BudgetSpent` where nothing is left."""

    async def reserve(self) -> None:
        """Asked before each model call."""
        ...

    def settle(self, usage: Usage | None) -> None:
        """Told after each reserved call; None where it gave no answer."""
        ...

    async def out_of_credit(self, message: str) -> None:
        """Told of a 402; returns when the call may be tried again."""
        ...


class BudgetSpent(SessionError):
    """The run's budget does not cover another call."""


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all sessions of a run. Times in seconds."""

    max_turns: int = 10
    session_timeout: float = 1800.0
    max_tokens: int | None = None
    ephemeral_system_prompt: str = ""
    prefill: tuple[Message, ...] = ()


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model as the record keeps it, used or not."""

    turn: int
    used: bool
    started: float  # time.time()
    reply: Reply


class SessionRecord(msgspec.Struct, kw_only=True):
    """All that happened in a session; the trajectory row and the session record are made from it."""

    spec: SessionSpec
    tools: tuple[ToolSchema, ...]
    messages: list[Message]
    outcome: Outcome = Outcome.INTERNAL_ERROR
    reason: str = ""  # why it stopped, where that is not plain from the outcome
    error: ErrorInfo | None = None
    fatal: bool = False  # every other session would meet the same error
    turns: list[ModelTurn] = []
    results: list[ToolResult] = []
    failed_requests: list[Any] = []  # attempts of the request that ended the session
    usage: Usage = Usage()
    api_calls: int = 0
    started: float = 0.0
    seconds: float = 0.0
    graded: bool = False
    reward: float = 0.0
    setup_output: str = ""
    verify_output: str = ""
    detail: str = ""  # a traceback, for what should never happen


_UNESCAPED = re.compile(r"[A-Za-z0-9 .,:;!?()_-]{6,}")  # stays as it is however a quote is escaped
_BEGINNING = 24  # characters by which a quoted text is known again; one of less than 6 is in too many words


class Unwritten:
    """The texts that are sent to the model and written nowhere. An error of the endpoint may quote the request."""

    def __init__(self, settings: SessionSettings) -> None:
        self._beginnings: list[str] = []
        for text in (settings.ephemeral_system_prompt, *(str(message.content) for message in settings.prefill)):
            found = _UNESCAPED.search(text)
            self._beginnings += [part[:_BEGINNING] for part in (text, found[0] if found else "") if len(part) >= 6]

    def hide(self, text: str) -> str:
        """The text up to where it quotes one of them."""
        places = [at for beginning in self._beginnings if (at := text.find(beginning)) >= 0]
        return f"{text[: min(places)]}[…]" if places else text

    def hide_in(self, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """The failed requests, their errors without quotes."""
        return tuple(msgspec.structs.replace(attempt, error=self.hide(attempt.error)) for attempt in attempts)


MOST_TOKENS = 2**40  # of one answer
MOST_COST = 1e6  # US dollars of one answer


def plausible(usage: Usage) -> Usage:
    """The usage of one answer within what sums, rows and frames can hold, for an endpoint may report anything."""
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens, usage.cached_tokens)
    if all(0 <= count <= MOST_TOKENS for count in counts) and 0 <= usage.cost_usd <= MOST_COST:
        return usage
    prompt, completion, reasoning, cached = (min(max(count, 0), MOST_TOKENS) for count in counts)
    sound = 0 <= usage.cost_usd <= MOST_COST
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        cached_tokens=cached,
        cost_usd=usage.cost_usd if sound else 0.0,
        cost_known=usage.cost_known and sound,
    )


def row_system(spec: SessionSpec) -> str:
    """The row's own system text: its `system` field, and the system messages of a prompt given as chat messages."""
    task = spec.task
    told = [str(m.content) for m in task.history if m.role == "system"]
    return "\n\n".join(filter(None, (task.system, *told)))
