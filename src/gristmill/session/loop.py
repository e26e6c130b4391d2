"""The turn loop: the one place where a model and tools meet.

```
prepare (files, setup) → ask → answer usable? → calls? → run them → ask … → final answer → follow-up? → … → verify
```

A session never raises for what a model, an endpoint or a sandbox does: it ends with an `Outcome` and keeps all that was
exchanged. Only cancellation passes through; `interrupt` says beforehand as which outcome it is to be recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from gristmill.conversation import AGENT_PROMPT
from gristmill.errors import ErrorKind, ModelError, SandboxError, TaskError
from gristmill.model.base import Model, Reply, Request
from gristmill.sandbox.base import ExecResult, Sandbox
from gristmill.session.record import (
    BudgetSpent,
    Gate,
    ModelTurn,
    SessionRecord,
    SessionSettings,
    Tools,
    Unwritten,
    plausible,
    row_system,
)
from gristmill.session.spec import SessionSpec
from gristmill.types import ErrorInfo, Message, Outcome, ToolCall, ToolResult

UNUSABLE_LIMIT = 3  # unusable answers in a row, and turns in a row without one valid call
SETUP_TIMEOUT = 600.0  # seconds of a row's `setup` and of its `verify`
LONGER_ANSWER = 8192  # output tokens of the second try where the first was cut and no limit was given


class Session:
    """One agent session. Made, run once; the caller starts nothing and stops the sandbox and the toolbox afterwards.

    `eager` starts the sandbox before the first model call, for where it may fail and money would be lost.
    """

    def __init__(
        self,
        spec: SessionSpec,
        model: Model,
        tools: Tools,
        sandbox: Sandbox,
        settings: SessionSettings,
        gate: Gate | None = None,
        *,
        eager: bool = False,
    ) -> None:
        self.spec = spec
        self._eager = eager
        self.model = model
        self.tools = tools
        self.sandbox = sandbox
        self.settings = settings
        self.gate = gate
        self._interrupted: Outcome | None = None
        self._limit: asyncio.Timeout | None = None
        self._prepared = False
        self._unwritten = Unwritten(settings)
        self._seen_ids: set[str] = set()
        self._followups = list(spec.task.followups)
        self._max_tokens = settings.max_tokens
        task = spec.task
        history = task.history or (Message(role="user", content=task.text),)
        self.record = SessionRecord(
            spec=spec, tools=tools.schemas, messages=[m for m in history if m.role != "system"], started=time.time()
        )
        system = "\n\n".join(filter(None, (AGENT_PROMPT, row_system(spec), settings.ephemeral_system_prompt)))
        self._head = (Message(role="system", content=system), *settings.prefill)

    def interrupt(self, outcome: Outcome) -> None:
        """Say as what the cancellation that follows is to be recorded: `interrupted` or `budget`."""
        self._interrupted = outcome

    async def run(self) -> SessionRecord:
        """Run to the end. Raises only `asyncio.CancelledError`, and only where `interrupt` was not called before."""
        record = self.record
        try:
            await self._play_in_time()
            if self.spec.task.verify and record.outcome.kept:
                await self._verify()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._interrupted is None or task is None:
                raise
            task.uncancel()
            self._fail(self._interrupted, str(self._interrupted), "the run was stopped while this session ran")
        return record

    async def _play_in_time(self) -> None:
        """Play within the session's time. Whatever ends it, each call has a result afterwards."""
        record, begun = self.record, time.monotonic()
        try:
            async with asyncio.timeout(self.settings.session_timeout) as limit:
                self._limit = limit
                record.outcome = await self._play()
        except TimeoutError:
            if not limit.expired():
                raise
            self._time_is_over()
        except BudgetSpent as error:
            self._fail(Outcome.BUDGET, "budget", error.message)
        except ModelError as error:
            self._model_failed(error)
        except SandboxError as error:
            self._fail(Outcome.SANDBOX_ERROR, "sandbox_error", str(error))
        except TaskError as error:
            self._fail(Outcome.SETUP_ERROR, "setup_error", str(error))
        finally:
            record.seconds = time.monotonic() - begun
            self._answer_open_calls()

    async def _play(self) -> Outcome:
        await self._prepare()
        self._prepared = True
        record = self.record
        invalid = 0
        while True:
            reply = await self._usable_answer()
            if isinstance(reply, Outcome):
                return reply
            message = self._keep(reply)
            if not message.tool_calls and not self._followups:
                return Outcome.COMPLETED
            if message.tool_calls:
                results = await self.tools.call_all(message.tool_calls)
                self._answer(results)
                invalid = 0 if any(r.valid for r in results) else invalid + 1
                if invalid >= UNUSABLE_LIMIT:
                    record.reason = f"{invalid} turns in a row without one valid tool call"
                    return Outcome.INVALID_TOOL_CALLS
            if record.api_calls >= self.settings.max_turns:
                record.reason = f"still at work after {record.api_calls} turns"
                return Outcome.TURN_LIMIT
            if not message.tool_calls:
                record.messages.append(Message(role="user", content=self._followups.pop(0)))

    async def _usable_answer(self) -> Reply | Outcome:
        """Ask until the answer is one. Unusable ones stay in the record and out of the conversation."""
        cut: Reply | None = None
        unusable = 0
        while True:
            try:
                reply = await self._ask()
            except ModelError as error:
                if cut is None or error.kind not in (ErrorKind.PERMANENT, ErrorKind.CONTEXT):
                    raise
                reply = cut  # the endpoint does not take the higher cap: the cut answer is what there is
            message = reply.message
            has_text = bool(message.content.strip() if isinstance(message.content, str) else message.content)
            if reply.finish == "content_filter":
                self._keep_without_calls(reply)
                self.record.reason = "the provider refused or filtered the answer"
                return Outcome.REFUSED
            if reply.finish == "length":
                if cut is not None:
                    self._keep_without_calls(reply)
                    self.record.reason = "cut by the output limit, also with a higher cap"
                    return Outcome.OUTPUT_TRUNCATED
                cut = reply
                self._max_tokens = max(2 * (self._max_tokens or 0), 2 * reply.usage.completion_tokens, LONGER_ANSWER)
                continue
            call_like = reply.suspect == "call_like_text" and not message.tool_calls
            if message.tool_calls or (has_text and not call_like):
                return reply
            unusable += 1
            if unusable >= UNUSABLE_LIMIT:
                if not call_like:
                    self.record.reason = f"nothing usable in {unusable} answers (finish: {reply.finish})"
                    return Outcome.EMPTY_ANSWER
                self._keep_without_calls(reply)
                self.record.reason = "calls written as text, which this dialect does not run"
                return Outcome.INVALID_TOOL_CALLS

    async def _ask(self) -> Reply:
        while True:
            try:
                return await self._request()
            except ModelError as error:
                if error.kind is not ErrorKind.CREDIT or self.gate is None:
                    raise
                await self._pause(self.gate, error)

    async def _pause(self, gate: Gate, error: ModelError) -> None:
        """Wait for the run's word after a 402; the pause does not count as the session's time."""
        limit, clock = self._limit, asyncio.get_running_loop().time
        end = limit.when() if limit is not None else None
        begun = clock()
        if limit is not None:
            limit.reschedule(None)
        await gate.out_of_credit(error.message)
        if limit is not None and end is not None:
            limit.reschedule(end + clock() - begun)

    async def _request(self) -> Reply:
        record = self.record
        if self.gate is not None:
            await self.gate.reserve()
        started = time.time()
        reply: Reply | None = None
        try:
            reply = await self.model.complete(
                Request(
                    messages=[*self._head, *record.messages],
                    tools=record.tools,
                    max_tokens=self._max_tokens,
                    session_id=f"{self.spec.task.key}-{self.spec.sample}",
                    deadline=self._deadline(),
                )
            )
            reply = msgspec.structs.replace(
                reply, usage=plausible(reply.usage), attempts=self._unwritten.hide_in(reply.attempts)
            )
        except ModelError as error:
            error.message = self._unwritten.hide(error.message)
            error.attempts = self._unwritten.hide_in(error.attempts)
            raise
        finally:
            if self.gate is not None:
                self.gate.settle(reply.usage if reply is not None else None)
        record.usage = record.usage + reply.usage
        record.turns.append(ModelTurn(turn=record.api_calls + 1, used=False, started=started, reply=reply))
        return reply

    def _deadline(self) -> float | None:
        """The end of the session's time, as a `time.monotonic()`; where no retry fits in, the endpoint has failed."""
        end = self._limit.when() if self._limit is not None else None
        return None if end is None else time.monotonic() + end - asyncio.get_running_loop().time()

    def _keep(self, reply: Reply) -> Message:
        """Take an answer into the conversation, with ids that are there and unique."""
        record = self.record
        record.api_calls += 1
        record.turns[-1] = msgspec.structs.replace(record.turns[-1], used=True)
        message = reply.message
        calls = []
        for position, call in enumerate(message.tool_calls):
            if not call.id or call.id in self._seen_ids:
                call = msgspec.structs.replace(call, id=self._new_id(f"call_{record.api_calls}_{position}"))
            self._seen_ids.add(call.id)
            calls.append(call)
        message = msgspec.structs.replace(message, tool_calls=tuple(calls))
        record.messages.append(message)
        return message

    def _new_id(self, id_: str) -> str:
        while id_ in self._seen_ids:
            id_ += "_"
        return id_

    def _keep_without_calls(self, reply: Reply) -> None:
        """The last answer of a session that ends with it; calls of a cut answer are never run nor shown as run."""
        message = msgspec.structs.replace(reply.message, tool_calls=())
        if message.content or message.reasoning:
            self._keep(msgspec.structs.replace(reply, message=message))

    def _answer(self, results: Sequence[ToolResult]) -> None:
        """Give the results to the model; the calls are rewritten with their arguments in the fixed form."""
        record = self.record
        last = record.messages[-1]
        record.messages[-1] = msgspec.structs.replace(
            last,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments=result.arguments)
                for call, result in zip(last.tool_calls, results, strict=True)
            ),
        )
        record.results.extend(results)
        record.messages.extend(
            Message(role="tool", tool_call_id=r.call_id, name=r.name, content=r.text) for r in results
        )

    def _answer_open_calls(self) -> None:
        """Every call has exactly one result, also where the session ended while tools ran."""
        messages = self.record.messages
        if not messages or not messages[-1].tool_calls:
            return
        text = '{"error": "the session ended before this call did"}'
        self._answer(
            [
                ToolResult(
                    call_id=call.id,
                    name=call.name,
                    text=text,
                    ok=False,
                    error="the session ended before this call did",
                    arguments=call.arguments,
                    known=any(tool.name == call.name for tool in self.record.tools),
                )
                for call in messages[-1].tool_calls
            ]
        )

    async def _prepare(self) -> None:
        task = self.spec.task
        if self._eager:
            await self.sandbox.start()
        for path, text in task.files.items():
            try:
                await self.sandbox.write(path, text.encode())
            except OSError as error:
                raise TaskError(f"The row's file {path!r} could not be placed: {error}.") from error
        if task.setup:
            result = await self.sandbox.exec(task.setup, timeout=SETUP_TIMEOUT)
            self.record.setup_output = _shown(result)
            if result.exit_code != 0:
                tail = self.record.setup_output[-500:]
                raise TaskError(f"The row's setup command ended with exit code {result.exit_code}: {tail}")

    async def _verify(self) -> None:
        """Grade the sandbox as the session left it: exit 0 is 1.0; a last line {"reward": x} says it itself."""
        record = self.record
        try:
            result = await self.sandbox.exec(self.spec.task.verify, timeout=SETUP_TIMEOUT, stateful=False)
        except SandboxError as error:
            # An ungraded row would be taken for a reward of zero, so the whole session is owed again.
            self._fail(Outcome.SANDBOX_ERROR, "verify", f"The row's verify command could not run: {error}")
            return
        record.verify_output = _shown(result)
        record.graded = True
        record.reward = 1.0 if result.exit_code == 0 else 0.0
        lines = record.verify_output.strip().splitlines()
        if lines:
            try:
                record.reward = msgspec.json.decode(lines[-1], type=_Grade).reward
            except msgspec.MsgspecError:
                return

    def _model_failed(self, error: ModelError) -> None:
        outcome = {
            ErrorKind.CONTEXT: Outcome.CONTEXT_OVERFLOW,
            ErrorKind.REFUSED: Outcome.REFUSED,
        }.get(error.kind, Outcome.MODEL_ERROR)
        self.record.failed_requests = list(error.attempts)
        self.record.fatal = error.kind.fatal
        self._fail(outcome, str(error.kind), str(error), error.status)

    def _time_is_over(self) -> None:
        """A session of which the endpoint or the sandbox made nothing is their failure, not a trajectory."""
        text = f"the session's {self.settings.session_timeout:g} s were over"
        if self.record.turns:
            self.record.outcome, self.record.reason = Outcome.SESSION_TIMEOUT, text
        elif self._prepared:
            self._fail(Outcome.MODEL_ERROR, "timeout", f"{text} before the model answered")
        else:
            self._fail(Outcome.SETUP_ERROR, "timeout", f"{text} before its sandbox was ready")

    def _fail(self, outcome: Outcome, kind: str, message: str, status: int = 0) -> None:
        self.record.outcome = outcome
        self.record.reason = message
        self.record.error = ErrorInfo(type=kind, message=message, status=status)


class _Grade(msgspec.Struct):
    reward: float


def _shown(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace")
