"""The model port: one request, one reply. Adapters: `chat`, `anthropic`, and the dialects `hermes` and `json_schema`.

Contract of `complete`:
- It returns exactly one usable-or-not answer of the model; whether it is usable the session decides.
- Retries of transient failures happen inside; every refused or failed request is listed in `Reply.attempts`
  (or in `ModelError.attempts`), so that nothing is lost from the record.
- What cannot be retried, or still fails, raises `errors.ModelError` with its kind.
- Cancellation ends the request at once and leaves the connection pool usable.
- Call ids may be missing or doubled in the reply; the session replaces them.
- Text is valid Unicode: lone surrogates are already U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gristmill.types import Message, ToolSchema, Usage


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `messages` starts with the system message, if any. `max_tokens` None is the provider's default.

    `deadline` is a `time.monotonic()`: no retry is waited for that would begin after it; the error is raised instead.
    """

    messages: Sequence[Message]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    session_id: str = ""
    deadline: float | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was refused or failed before the one that answered."""

    error: str
    kind: str
    status: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds of backoff after it


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    `finish` is `stop`, `tool_calls`, `length`, `content_filter`, or the provider's own word verbatim.
    `raw` is the provider's answer without what `message` already holds in full; kept in the session record.
    `suspect` names an oddity (`zero_completion_tokens`, `call_like_text`), empty otherwise.
    """

    message: Message
    finish: str
    usage: Usage
    seconds: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    raw: dict[str, Any] = {}
    suspect: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is used by one worker: requests allowed at once, under way, waiting; calls, refusals."""

    limit: int
    in_flight: int
    waiting: int
    calls: int
    refused: int


class Model(Protocol):
    """One endpoint and model name, shared by all sessions of a worker."""

    @property
    def load(self) -> Load | None:
        """How the endpoint is used at present; None where that is not known."""
        ...

    async def complete(self, request: Request) -> Reply:
        """Ask once. Raises `errors.ModelError`."""
        ...

    async def close(self) -> None:
        """Give back connections; idempotent."""
        ...
