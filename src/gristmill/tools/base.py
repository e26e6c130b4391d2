"""The tools port: `Tool` is data and one coroutine, `Toolset` a named group, `Toolbox` what one session is offered.

Contract:
- `Tool.run` gets arguments that already fit its JSON Schema. It returns a JSON-able dict (the usual case) or text.
  An error that the model should read is a result (`{"error": …}`); an exception that is not a `SessionError` becomes
  `{"error": "<what happened>"}` with `ok=False`. A `SandboxError` ends the session.
- `access` says what a call touches; calls that conflict run in call order, the others at once.
- Success is decided here, from the result's own fields, before any decoration (`succeeded`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.sandbox.base import Sandbox
from gristmill.types import ToolSchema

RESULT_LIMIT = 100_000  # characters of one tool result that a model reads
TERMINAL_LIMIT = 50_000  # characters of one command's output

ToolOutput = dict[str, Any] | str | None


@dataclass(frozen=True)
class Access:
    """What one call touches: a path of names from the general to the special, and whether it changes it.

    Two accesses conflict where one path begins with the other and at least one of them writes. `()` touches nothing.
    The terminal writes `("sandbox",)`; reading a file reads `("sandbox", path)`; a search on the web is `()`.
    """

    path: tuple[str, ...] = ()
    writes: bool = False

    def conflicts(self, other: Access) -> bool:
        """True where the two calls must not overlap."""
        if not (self.writes or other.writes) or not self.path or not other.path:
            return False
        shared = min(len(self.path), len(other.path))
        return self.path[:shared] == other.path[:shared]


NOTHING = Access()


@dataclass(frozen=True)
class AskModel:
    """A question with pictures to a vision model: data or http URLs in, text out. Raises `errors.ModelError`."""

    ask: Callable[[str, list[str]], Awaitable[str]]
    model: str = ""


@dataclass
class ToolContext:
    """What a tool may use while it serves one session.

    `state` is private to the session, one entry per toolset (background jobs, an open page, …); `closers` run when the
    session ends, last first. `shared` and `shared_closers` are the same for all sessions of a worker: what is dear to
    start (a browser, a client), and how the worker ends it.
    """

    sandbox: Sandbox
    session_id: str = ""
    terminal_timeout: float = 180.0
    allow_private_urls: bool = False
    vision: AskModel | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # keys and URLs of tool providers, from config
    state: dict[str, Any] = field(default_factory=dict)
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    shared_closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


def _no_access(arguments: dict[str, Any]) -> Access:
    return NOTHING


@dataclass(frozen=True)
class Tool:
    """One tool. `limit` is the most characters of its result that the model reads; a longer one goes to a file."""

    schema: ToolSchema
    toolset: str
    run: Callable[[ToolContext, dict[str, Any]], Awaitable[ToolOutput]]
    access: Callable[[dict[str, Any]], Access] = _no_access
    limit: int = RESULT_LIMIT

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.schema.name


@dataclass(frozen=True)
class Toolset:
    """A named group of tools. `missing(settings)` says why it cannot work here, empty where it can."""

    name: str
    tools: tuple[Tool, ...]
    missing: Callable[[Mapping[str, str]], str] = lambda settings: ""


def succeeded(output: ToolOutput, *, is_json: bool) -> tuple[bool, str]:
    """Whether a result is a success, and its error text; the rule for `tool_stats`.

    A dict with a non-null `error`, or `success: false`, or whose `content` is a dict with a non-null `error`, is a
    failure; text that is not JSON is a failure only if it is empty or starts with `Error:` in any case.
    """
    if isinstance(output, dict):
        inner = output.get("content")
        error = output.get("error")
        if error is None and isinstance(inner, dict):
            error = inner.get("error")
        if error is not None:
            return False, str(error)
        if output.get("success") is False:
            return False, str(output.get("message") or "success is false")
        return True, ""
    if is_json:
        return True, ""
    text = (output or "").strip()
    if not text:
        return False, "empty result"
    if text[:6].lower() == "error:":
        return False, text[:500]
    return True, ""
