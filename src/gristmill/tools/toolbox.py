"""What one session is offered: takes a turn's calls, gives exactly one result per call, in call order.

Calls whose `Access` conflicts run one after another in call order, all others at once. A tool's exception becomes its
result; only a `SessionError` (the sandbox died, the budget is spent) passes through, after the turn's other calls were
ended; but a `ModelError` of a tool that asks a model of its own is that tool's failure.

A result over its limit is written whole into the sandbox as `<workspace>/.gristmill/NNNN.json` (`.txt` where it is not
JSON; NNNN counts the session's calls) and the model reads a preview that names the path; git ignores the folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import orjson

from gristmill.errors import ModelError, SessionError
from gristmill.tools.arguments import Arguments, ArgumentSchema, compile_schema, parse_arguments, parse_object
from gristmill.tools.base import NOTHING, Access, Tool, ToolContext, ToolOutput, succeeded
from gristmill.tools.builtin import TOOL_ORDER
from gristmill.tools.text import bounded, json_text, shorten, shown_text, valid_text
from gristmill.types import ToolCall, ToolResult, ToolSchema

RESULT_FOLDER = ".gristmill"
PREVIEW_LIMIT = 4_000  # characters shown of a result that went to a file
ERROR_LIMIT = 2_000  # characters of an error text
EVERYTHING = Access(("sandbox",), writes=True)

Run = Callable[[], Awaitable[ToolResult]]


class Toolbox:
    """The tools of one session. Made per session; `close` ends what its tools started.

    Args:
        tools: in any order; of two with one name the first is offered.
        context: this session's.
    """

    def __init__(self, tools: Iterable[Tool], context: ToolContext) -> None:
        offered: dict[str, Tool] = {}
        for tool in tools:
            offered.setdefault(tool.name, tool)
        last = len(TOOL_ORDER)
        # Whatever the order of a draw: the built-in ones as in the table, then others by toolset.
        names = sorted(offered, key=lambda name: (TOOL_ORDER.get(name, last), offered[name].toolset))
        self._tools: dict[str, tuple[Tool, ArgumentSchema]] = {
            name: (offered[name], compile_schema(offered[name].schema.parameters)) for name in names
        }
        self._context = context
        self._calls = 0
        self.schemas: tuple[ToolSchema, ...] = tuple(offered[name].schema for name in names)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run a turn's calls. Raises a `SessionError` of a tool; cancellation ends all calls first."""
        if len(calls) == 1:
            return [await self._prepare(calls[0])[1]()]
        tasks: list[asyncio.Task[ToolResult]] = []
        accesses: list[Access] = []
        for call in calls:
            access, run = self._prepare(call)
            before = [tasks[index] for index in _before(accesses, access)]
            tasks.append(asyncio.create_task(_after(before, run)))
            accesses.append(access)
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def close(self) -> None:
        """Run the closers of the context, last first, each exactly once; raises the last error after all have run."""
        async with AsyncExitStack() as stack:
            for closer in self._context.closers:
                stack.push_async_callback(closer)
            self._context.closers.clear()

    def _prepare(self, call: ToolCall) -> tuple[Access, Run]:
        """What the call touches, and what gives its result."""
        self._calls += 1
        found = self._tools.get(call.name)
        if found is None:
            return NOTHING, partial(_refused, call, self._unknown(call.name), _as_sent(call.arguments), known=False)
        tool, schema = found
        arguments = parse_arguments(call.arguments, schema)
        if not isinstance(arguments, Arguments):
            return NOTHING, partial(_refused, call, arguments.reason, arguments.text)
        try:
            access = tool.access(arguments.values)
        except Exception:  # noqa: BLE001 - other people's code; what it touches is unknown, and running it will tell why
            access = EVERYTHING
        return access, partial(self._run, self._calls, call, tool, arguments)

    def _unknown(self, name: str) -> str:
        available = ", ".join(self._tools) or "none"
        return f"There is no tool named {bounded(valid_text(name), 100)!r}. Available tools: {available}."

    async def _run(self, number: int, call: ToolCall, tool: Tool, arguments: Arguments) -> ToolResult:
        begun = time.perf_counter()
        output: Any
        try:
            output = await tool.run(self._context, arguments.values)
        except ModelError as error:
            output = {"error": str(error)}
        except SessionError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            output = {"error": "The tool was cancelled from within."}
        # SystemExit and its like end an event loop when they leave a task, and every other session with it.
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge to other people's tools
            output = {"error": _sentence(error)}
        seconds = time.perf_counter() - begun
        text, ok, failure = _judged(output)
        if len(text) > tool.limit:
            text = await self._spilled(number, output, text, tool.limit, failure)
        return ToolResult(
            call_id=call.id,
            name=call.name,
            text=text,
            ok=ok,
            error=failure,
            arguments=arguments.text,
            seconds=seconds,
        )

    async def _spilled(self, number: int, output: ToolOutput, text: str, limit: int, failure: str) -> str:
        """The preview of a result whose whole was written into the sandbox; head and tail where that fails."""
        sandbox = self._context.sandbox
        is_json = not isinstance(output, str)
        folder = f"{sandbox.workspace}/{RESULT_FOLDER}"
        path = f"{folder}/{number:04d}.{'json' if is_json else 'txt'}"
        # Indented, so that tools which read by lines can look into it.
        whole = orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2) if is_json else text.encode()
        try:
            await sandbox.write(f"{folder}/.gitignore", b"*\n")
            await sandbox.write(path, whole)
        except OSError as error:
            note = (
                f"The result of {len(text):,} characters was cut; it could not be saved ({bounded(str(error), 200)})."
            )
            saved = ""
        else:
            note = f"The result of {len(text):,} characters was too long to show; the whole is in {path}."
            saved = path
        if not is_json:
            room = limit if not saved else min(limit, PREVIEW_LIMIT)
            return bounded(f"{shorten(text, max(1, room - len(note) - 2))}\n\n{note}", limit)
        preview: dict[str, Any] = {"truncated": True, "note": note, "saved_to": saved}
        if failure:
            preview["error"] = failure
        # JSON inside JSON grows by its escapes, at most twofold here since the inner text has no control characters.
        room = limit // 2 - len(json_text(preview)) if not saved else min(limit // 2, PREVIEW_LIMIT)
        preview["preview"] = shorten(text, max(1, room))
        shown = json_text(preview)
        return shown if len(shown) <= limit else bounded(json_text({"truncated": True, "saved_to": saved}), limit)


def _before(accesses: list[Access], access: Access) -> list[int]:
    """Which earlier calls must have ended before one with this access may start."""
    found: list[int] = []
    for index in range(len(accesses) - 1, -1, -1):
        earlier = accesses[index]
        if earlier.conflicts(access):
            found.append(index)
            if earlier.writes and access.path[: len(earlier.path)] == earlier.path:
                break  # it covers all that this call touches, so it already waited for whoever came before
    return found


async def _after(before: list[asyncio.Task[ToolResult]], run: Run) -> ToolResult:
    if before:
        await asyncio.wait(before)
        for task in before:
            task.result()  # a SessionError there is one here too: nothing more runs
    return await run()


def _judged(output: Any) -> tuple[str, bool, str]:
    """The text that the model reads, whether the call succeeded, and its error; decided on the tool's own words."""
    if output is None or (isinstance(output, str) and not output.strip()):
        return '{"error":"The tool returned nothing."}', False, "empty result"
    if isinstance(output, str):
        judged: Any = output
        if output[:1] == "{":
            try:
                judged = orjson.loads(output)
            except orjson.JSONDecodeError:
                judged = output
        ok, error = succeeded(judged, is_json=not isinstance(judged, str))
        return shown_text(output), ok, bounded(valid_text(error), ERROR_LIMIT)
    ok, error = succeeded(output, is_json=True)
    return json_text(output), ok, bounded(valid_text(error), ERROR_LIMIT)


async def _refused(call: ToolCall, reason: str, arguments: str, *, known: bool = True) -> ToolResult:
    return ToolResult(
        call_id=call.id,
        name=call.name,
        text=json_text({"error": reason}),
        ok=False,
        error=reason,
        arguments=arguments,
        known=known,
        valid=False,
    )


def _as_sent(raw: str) -> str:
    """The arguments of a call that nothing checks: in the fixed form where they are an object, else the raw text."""
    arguments = parse_object(raw)
    return json_text(arguments) if isinstance(arguments, dict) else arguments.text


def _sentence(error: BaseException) -> str:
    """An exception in words; the type is named where its text alone says little."""
    text = bounded(str(error), ERROR_LIMIT)
    if isinstance(error, TimeoutError) and not text:
        return "The tool timed out."
    plain = isinstance(error, (OSError, ValueError)) and not isinstance(error, UnicodeError)
    return text if text and plain else f"{type(error).__name__}: {text}".rstrip(": ")
