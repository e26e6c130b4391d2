"""The turn loop: every outcome, ids, results, follow-ups, verify; with a model that says what a list says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gristmill.errors import ErrorKind, ModelError, SandboxError
from gristmill.model.base import Attempt, Reply, Request
from gristmill.sandbox.base import Capabilities, ExecResult, Job, Sandbox, SandboxSpec
from gristmill.session.loop import Session
from gristmill.session.record import BudgetSpent, SessionRecord, SessionSettings
from gristmill.session.spec import SessionSpec
from gristmill.task import Task
from gristmill.tools.base import Tool, ToolContext
from gristmill.tools.toolbox import Toolbox
from gristmill.types import Message, Outcome, ToolCall, ToolSchema, Usage

SILENT = Exception("an answer that never comes")


class Saying:
    """A model that gives the listed answers in order (the last one again and again), and keeps the requests."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> Reply:
        self.requests.append(Request(**{f: getattr(request, f) for f in request.__struct_fields__}))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(60 if answer is SILENT else 0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        return None


class Shell(Sandbox):
    """A sandbox in which every command prints its own text; `exit N` ends with N."""

    capabilities = Capabilities(isolated=False)

    def __init__(self) -> None:
        super().__init__(SandboxSpec(session_id="s", run_id="r"))
        self.files: dict[str, bytes] = {}
        self.started = False

    async def start(self) -> None:
        self.started = True

    async def exec(
        self, command: str, *, timeout: float, workdir: str = "", stdin: bytes = b"", stateful: bool = True
    ) -> ExecResult:
        if command == "die":
            raise SandboxError("the sandbox died")
        if command == "hang":
            await asyncio.sleep(60)
        code = int(command.split()[1]) if command.startswith("exit") else 0
        return ExecResult(output=command.encode(), exit_code=code)

    async def spawn(self, command: str, *, workdir: str = "") -> Job:
        raise SandboxError("no jobs here")

    async def read(self, path: str, limit: int) -> bytes:
        return self.files[path][:limit]

    async def write(self, path: str, data: bytes) -> None:
        if ".." in path:
            raise PermissionError(path)
        self.files[path] = data

    async def stop(self) -> None:
        self.started = False

    def cleanup(self) -> None:
        return None


async def _echo(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["text"] == "sleep":
        await asyncio.sleep(30)
    if arguments["text"] == "die":
        raise SandboxError("the sandbox died")
    return {"output": arguments["text"]}


ECHO = Tool(
    schema=ToolSchema(
        name="echo",
        description="Says it again.",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ),
    toolset="echo",
    run=_echo,
)


def said(text: str, *, finish: str = "stop", reasoning: str = "", suspect: str = "") -> Reply:
    message = Message(role="assistant", content=text, reasoning=reasoning)
    return Reply(message=message, finish=finish, usage=Usage(prompt_tokens=10, completion_tokens=5), suspect=suspect)


def called(*pairs: tuple[str, str], ids: Sequence[str] = (), finish: str = "tool_calls", name: str = "echo") -> Reply:
    ids = ids or [f"c{n}" for n in range(len(pairs))]
    calls = tuple(ToolCall(id=i, name=n, arguments=a) for i, (n, a) in zip(ids, pairs, strict=True))
    message = Message(role="assistant", tool_calls=calls)
    return Reply(message=message, finish=finish, usage=Usage(prompt_tokens=10, completion_tokens=5))


def echo(text: str, *, call_id: str = "c0") -> Reply:
    return called(("echo", f'{{"text": "{text}"}}'), ids=[call_id])


async def play(
    *answers: Reply | Exception, sandbox: Shell | None = None, gate: Any = None, **options: Any
) -> tuple[SessionRecord, Saying, Shell]:
    task_fields = {k: options.pop(k) for k in list(options) if k in Task.__struct_fields__}
    sandbox = sandbox or Shell()
    model = Saying(*answers)
    spec = SessionSpec(
        task=Task(**{"index": 0, "line": 1, "key": "k", "text": "the prompt", **task_fields}),
        sample=0,
        batch=0,
        attempt=1,
        toolsets=("echo",),
        probability=1.0,
        seed=1,
    )
    tools = Toolbox([ECHO], ToolContext(sandbox=sandbox))
    session = Session(spec, model, tools, sandbox, SessionSettings(**options), gate)
    return await session.run(), model, sandbox


def roles(record: SessionRecord) -> str:
    return " ".join(m.role for m in record.messages)


async def test_a_final_answer_completes() -> None:
    record, model, _ = await play(echo("hi"), said("done"))
    assert record.outcome is Outcome.COMPLETED
    assert roles(record) == "user assistant tool assistant"
    assert record.messages[2].content == '{"output":"hi"}'
    assert record.api_calls == 2 and record.usage.prompt_tokens == 20
    assert [m.role for m in model.requests[1].messages] == ["system", "user", "assistant", "tool"]


async def test_mr_37_turn_limit_stands_as_it_is() -> None:
    """MR-37, CO-08: still calling tools at max_turns is no success and asks for no summary."""
    record, model, _ = await play(echo("a"), echo("b"), said("never asked for"), max_turns=2)
    assert record.outcome is Outcome.TURN_LIMIT
    assert not record.outcome.completed and record.outcome.kept
    assert roles(record) == "user assistant tool assistant tool"
    assert len(model.requests) == record.api_calls == 2


async def test_mr_12_an_empty_answer_is_never_completed() -> None:
    """MR-12: asked again, and nothing empty enters the conversation."""
    record, model, _ = await play(echo("a"), said(""), said("   \n"), said("done"))
    assert record.outcome is Outcome.COMPLETED
    assert roles(record) == "user assistant tool assistant"
    assert len(model.requests) == 4 and record.api_calls == 2
    assert [t.used for t in record.turns] == [True, False, False, True]


async def test_mr_34_nothing_usable_three_times() -> None:
    """MR-34: an unknown finish reason is kept verbatim and is no success."""
    record, model, _ = await play(said("", finish="MALFORMED_FUNCTION_CALL"))
    assert record.outcome is Outcome.EMPTY_ANSWER and record.outcome.partial
    assert len(model.requests) == 3 and roles(record) == "user"
    assert record.turns[0].reply.finish == "MALFORMED_FUNCTION_CALL"


async def test_mr_28_calls_written_as_text_do_not_complete() -> None:
    """MR-28: call-like text is not run and the row says so."""
    reply = said('<tool_call>\n{"name": "echo"}\n</tool_call>', suspect="call_like_text")
    record, model, _ = await play(reply)
    assert record.outcome is Outcome.INVALID_TOOL_CALLS and not record.outcome.completed
    assert len(model.requests) == 3 and not record.results


async def test_three_turns_without_a_valid_call() -> None:
    record, _, _ = await play(called(("nope", "{}")))
    assert record.outcome is Outcome.INVALID_TOOL_CALLS
    assert record.api_calls == 3 and len(record.results) == 3
    assert all(not r.known for r in record.results)


async def test_one_valid_call_among_bad_ones_starts_the_count_anew() -> None:
    bad = called(("nope", "{}"))
    mixed = called(("nope", "{}"), ("echo", '{"text": "x"}'), ids=["m1", "m2"])
    record, _, _ = await play(bad, bad, mixed, bad, bad, said("done"))
    assert record.outcome is Outcome.COMPLETED


async def test_a_cut_answer_is_tried_once_with_a_higher_cap() -> None:
    record, model, _ = await play(said("half", finish="length"), said("whole"), max_tokens=100)
    assert record.outcome is Outcome.COMPLETED and record.messages[-1].content == "whole"
    assert [r.max_tokens for r in model.requests] == [100, 8192]
    assert record.api_calls == 1


async def test_mr_16_cut_twice_is_truncated_and_no_cut_call_runs() -> None:
    """MR-16: cut by the limit; a cut tool call is never executed."""
    record, _, _ = await play(called(("echo", '{"text": "x"}'), finish="length"), said("half", finish="length"))
    assert record.outcome is Outcome.OUTPUT_TRUNCATED and record.outcome.partial
    assert record.messages[-1].content == "half" and not record.results


async def test_a_refused_higher_cap_leaves_the_cut_answer() -> None:
    refusal = ModelError("max_tokens is too large", ErrorKind.PERMANENT, status=400)
    record, _, _ = await play(said("half", finish="length"), refusal)
    assert record.outcome is Outcome.OUTPUT_TRUNCATED
    assert record.messages[-1].content == "half"


@pytest.mark.parametrize(
    ("kind", "outcome", "fatal"),
    [
        (ErrorKind.CONTEXT, Outcome.CONTEXT_OVERFLOW, False),
        (ErrorKind.REFUSED, Outcome.REFUSED, False),
        (ErrorKind.TRANSIENT, Outcome.MODEL_ERROR, False),
        (ErrorKind.PERMANENT, Outcome.MODEL_ERROR, False),
        (ErrorKind.AUTH, Outcome.MODEL_ERROR, True),
        (ErrorKind.NOT_FOUND, Outcome.MODEL_ERROR, True),
    ],
)
async def test_co_03_errors_of_the_endpoint_have_their_outcomes(kind: ErrorKind, outcome: Outcome, fatal: bool) -> None:
    """CO-03: turns so far are kept; a context overflow is told apart from a bad request."""
    record, _, _ = await play(echo("a"), ModelError("no", kind, status=400))
    assert (record.outcome, record.fatal) == (outcome, fatal)
    assert roles(record) == "user assistant tool"
    assert record.error is not None and record.error.status == 400


async def test_content_filter_is_refused() -> None:
    record, _, _ = await play(said("I can", finish="content_filter"))
    assert record.outcome is Outcome.REFUSED and record.outcome.kept and not record.outcome.partial


async def test_mr_22_mr_23_ids_are_there_and_unique() -> None:
    """MR-22, MR-23: doubled, empty and repeated ids are replaced on both sides."""
    twice = called(("echo", '{"text": "A"}'), ("echo", '{"text": "B"}'), ids=["f:1", "f:1"])
    again = called(("echo", '{"text": "C"}'), ("echo", '{"text": "D"}'), ids=["f:1", ""])
    record, _, _ = await play(twice, again, said("done"))
    ids = [c.id for m in record.messages for c in m.tool_calls]
    assert len(set(ids)) == 4 and all(ids)
    answers = {m.tool_call_id: m.content for m in record.messages if m.role == "tool"}
    assert [answers[i] for i in ids] == [f'{{"output":"{t}"}}' for t in "ABCD"]


async def test_session_timeout_keeps_what_there_is() -> None:
    """SB-08, EX-15: recorded so far is saved, and each call has its result."""
    record, _, _ = await play(echo("a"), echo("sleep", call_id="c1"), session_timeout=0.2)
    assert record.outcome is Outcome.SESSION_TIMEOUT
    assert roles(record) == "user assistant tool assistant tool"
    assert "ended before" in str(record.messages[-1].content)


@pytest.mark.parametrize(
    ("setup", "outcome", "asked"), [("hang", Outcome.SETUP_ERROR, 0), ("", Outcome.MODEL_ERROR, 1)]
)
async def test_a_session_without_one_answer_is_a_failure_and_no_discard(
    setup: str, outcome: Outcome, asked: int
) -> None:
    """DU-09: what a silent endpoint or a slow sandbox left is no trajectory without a turn, and is owed."""
    record, model, _ = await play(SILENT, setup=setup, session_timeout=0.2)
    assert record.outcome is outcome and not record.outcome.kept
    assert "the session's 0.2 s were over" in record.reason and record.error is not None
    assert len(model.requests) == asked


async def test_no_retry_is_waited_for_beyond_the_sessions_time() -> None:
    """An endpoint that is down is an error of the endpoint, never a session that took too long."""
    _, model, _ = await play(echo("a"), said("done"), session_timeout=7.0)
    assert [r.deadline is not None and 6 < r.deadline - time.monotonic() <= 7 for r in model.requests] == [True, True]


async def test_a_timeout_that_is_not_the_sessions_passes_as_a_fault() -> None:
    with pytest.raises(TimeoutError, match="of a part"):
        await play(TimeoutError("of a part"), session_timeout=5)


async def test_turn_limit_leaves_no_follow_up_without_an_answer() -> None:
    record, _, _ = await play(said("one"), said("two"), followups=("a", "b"), max_turns=2)
    assert record.outcome is Outcome.TURN_LIMIT
    assert roles(record) == "user assistant user assistant"


async def test_a_made_up_id_is_not_one_that_the_model_used() -> None:
    first = called(("echo", '{"text": "A"}'), ids=["call_2_0"])
    record, _, _ = await play(first, called(("echo", '{"text": "B"}'), ids=[""]), said("done"))
    ids = [c.id for m in record.messages for c in m.tool_calls]
    assert len(set(ids)) == 2


async def test_a_usage_that_cannot_be_is_brought_within_bounds() -> None:
    """Sums, rows and frames hold 64 bits; 2**70 tokens of an odd endpoint must not end the session."""
    odd = msgspec.structs.replace(
        said("x"), usage=Usage(prompt_tokens=2**70, completion_tokens=-5, cost_usd=float("inf"))
    )
    record, _, _ = await play(odd)
    assert record.outcome is Outcome.COMPLETED
    assert 0 < record.usage.prompt_tokens < 2**62 and record.usage.completion_tokens == 0
    assert record.usage.cost_usd == 0.0 and not record.usage.cost_known


async def test_du_06_a_dead_sandbox_is_an_outcome() -> None:
    record, _, _ = await play(echo("die"))
    assert record.outcome is Outcome.SANDBOX_ERROR and not record.outcome.kept


async def test_files_setup_followups_and_verify() -> None:
    record, model, sandbox = await play(
        said("one"),
        said("two"),
        files={"a.txt": "x"},
        setup="make",
        followups=("and now?",),
        verify='{"reward": 0.25}',
    )
    assert record.outcome is Outcome.COMPLETED
    assert sandbox.files == {"a.txt": b"x"}
    assert roles(record) == "user assistant user assistant"
    assert (record.graded, record.reward) == (True, 0.25)
    assert len(model.requests) == 2


async def test_failing_setup_fails_the_prompt_before_any_model_call() -> None:
    record, model, _ = await play(said("never"), setup="exit 3")
    assert record.outcome is Outcome.SETUP_ERROR and not model.requests


async def test_verify_decides_by_exit_code_and_a_failed_verify_is_no_zero() -> None:
    good, _, _ = await play(said("x"), verify="exit 0")
    bad, _, _ = await play(said("x"), verify="exit 1")
    dead, _, _ = await play(said("x"), verify="die")
    assert (good.reward, bad.reward) == (1.0, 0.0) and good.graded and bad.graded
    assert dead.outcome is Outcome.SANDBOX_ERROR and not dead.graded


async def test_ephemeral_and_prefill_are_sent_and_not_recorded() -> None:
    prefill = (Message(role="user", content="example"), Message(role="assistant", content="shown"))
    record, model, _ = await play(said("x"), ephemeral_system_prompt="SECRET", prefill=prefill, system="for this row")
    sent = model.requests[0].messages
    assert [m.role for m in sent] == ["system", "user", "assistant", "user"]
    assert str(sent[0].content).endswith("for this row\n\nSECRET")
    assert roles(record) == "user assistant"


async def test_what_is_never_written_is_not_quoted_by_an_error() -> None:
    """An endpoint that answers with the request it did not like must not bring the ephemeral prompt into the record."""
    quote = 'bad request: {"content": "You are an agent.\\n\\nSay \\"yes\\" always.\\nPLAN B"}, {"content": "example"}'
    attempt = Attempt(error=quote, kind="transient", status=500)
    refusal = ModelError(quote, ErrorKind.PERMANENT, status=400)
    refusal.attempts = (attempt,)
    later = msgspec.structs.replace(echo("a"), attempts=(attempt,))
    record, _, _ = await play(later, refusal, ephemeral_system_prompt='Say "yes" always.\nPLAN B')
    assert record.outcome is Outcome.MODEL_ERROR
    assert record.reason.startswith("bad request: ") and record.reason.endswith("[…]")
    written = msgspec.json.encode(record)
    assert b"always" not in written and b"PLAN" not in written
    refusal = ModelError(quote, ErrorKind.PERMANENT, status=400)
    prefill = (Message(role="user", content="example"), Message(role="assistant", content="e"))
    record, _, _ = await play(refusal, prefill=prefill)
    assert "PLAN" in record.reason and "example" not in record.reason


async def test_interrupt_is_recorded_and_plain_cancellation_passes() -> None:
    sandbox = Shell()
    spec = SessionSpec(
        task=Task(index=0, line=1, key="k", text="p"),
        sample=0,
        batch=0,
        attempt=1,
        toolsets=(),
        probability=1.0,
        seed=1,
    )
    for told in (True, False):
        tools = Toolbox([ECHO], ToolContext(sandbox=sandbox))
        session = Session(spec, Saying(echo("sleep")), tools, sandbox, SessionSettings())
        task = asyncio.create_task(session.run())
        await asyncio.sleep(0.05)
        if told:
            session.interrupt(Outcome.INTERRUPTED)
            task.cancel()
            record = await task
            assert record.outcome is Outcome.INTERRUPTED and roles(record) == "user assistant tool"
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_interrupt_while_verifying_is_recorded() -> None:
    task = Task(index=0, line=1, key="k", text="p", verify="hang")
    spec = SessionSpec(task=task, sample=0, batch=0, attempt=1, toolsets=(), probability=1.0, seed=1)
    sandbox = Shell()
    session = Session(spec, Saying(said("done")), Toolbox([], ToolContext(sandbox=sandbox)), sandbox, SessionSettings())
    running = asyncio.create_task(session.run())
    await asyncio.sleep(0.05)
    session.interrupt(Outcome.INTERRUPTED)
    running.cancel()
    record = await running
    assert record.outcome is Outcome.INTERRUPTED and not record.graded
    assert record.usage.prompt_tokens == 10 and record.seconds > 0


class _Gate:
    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.settled = 0

    async def reserve(self) -> None:
        if not self.calls:
            raise BudgetSpent("--max_cost is used up")
        self.calls -= 1

    def settle(self, usage: Usage | None) -> None:
        self.settled += 1

    async def out_of_credit(self, message: str) -> None:
        await asyncio.sleep(0.3)


async def test_a_spent_budget_ends_the_session_before_the_call() -> None:
    gate = _Gate(2)
    record, model, _ = await play(echo("a"), gate=gate)
    assert record.outcome is Outcome.BUDGET and not record.outcome.kept
    assert len(model.requests) == 2 == gate.settled


async def test_co_02_an_empty_account_pauses_and_the_pause_is_not_the_sessions_time() -> None:
    """CO-02: a 402 waits for the run's word, then the same call is made again."""
    empty = ModelError("Insufficient credits", ErrorKind.CREDIT, status=402)
    record, model, _ = await play(empty, said("done"), gate=_Gate(9), session_timeout=0.25)
    assert record.outcome is Outcome.COMPLETED and len(model.requests) == 2
