"""Bug cases of tool calls, at the border where they run: the toolbox, in a real sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from gristmill.sandbox.base import OUTPUT_HEAD, OUTPUT_TAIL
from gristmill.tools.base import RESULT_LIMIT, TERMINAL_LIMIT, Tool, ToolContext, ToolOutput
from gristmill.tools.functions import tool
from gristmill.tools.text import decode_output
from gristmill.types import ToolCall, ToolResult, ToolSchema
from support.toolboxes import Bench, bench


def gives(name: str, *outputs: Any) -> Tool:
    """A tool that gives these outputs, one after another."""
    left = iter(outputs)

    async def run(context: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        output = next(left)
        if isinstance(output, Exception):
            raise output
        return output  # type: ignore[no-any-return]

    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "additionalProperties": False}
    return Tool(ToolSchema(name=name, description=name, parameters=schema), "test", run)


def counts(results: list[ToolResult], name: str) -> tuple[int, int, int]:
    """Calls, successes and failures of a tool, as its statistics count them."""
    own = [result.ok for result in results if result.name == name]
    return len(own), sum(own), len(own) - sum(own)


@pytest.fixture
async def tools() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


# ---- arguments


async def test_in_12_deeply_nested_arguments(tools: Bench) -> None:
    nested = '{"command": "x", "extra": ' + "[" * 100_000
    closed = '{"command": "x", "extra": ' + "[" * 900 + "]" * 900 + "}"
    for raw in (nested, closed, "[" * 100_000):
        result = await tools.result("terminal", raw)
        assert not result.ok and not result.valid
        assert len(result.text) < 2_000
    assert await tools.shell("echo fine") == "fine\n"


async def test_mr_01_arguments_encoded_twice(tools: Bench) -> None:
    result = await tools.result("terminal", '"{\\"command\\": \\"echo hi | tee -a ran\\"}"')
    assert orjson.loads(result.text) == {"output": "hi\n", "exit_code": 0, "error": None}
    assert result.arguments == '{"command":"echo hi | tee -a ran"}'
    assert await tools.shell("cat ran") == "hi\n"


async def test_mr_03_arguments_that_are_null_absent_or_an_object() -> None:
    async with bench(gives("todo_list", {"n": 1}, {"n": 2}, {"n": 3})) as tools:
        for raw in (None, "", "null"):  # null, absent, and the text null
            (result,) = await tools.toolbox.call_all([ToolCall(id="c", name="todo_list", arguments=raw)])  # type: ignore[arg-type]
            assert (result.ok, result.arguments) == (True, "{}")
        as_object: Any = {"command": "echo hi"}
        (result,) = await tools.toolbox.call_all([ToolCall(id="c3", name="terminal", arguments=as_object)])
        assert '"output":"hi\\n"' in result.text
        assert result.arguments == '{"command":"echo hi"}'


async def test_mr_04_arguments_that_are_json_but_no_object(tools: Bench) -> None:
    raws = ["[]", '"ls"', "3", "true", '[{"command": "ls"}]']
    results = await tools.all(*(("terminal", raw) for raw in raws))
    for raw, result in zip(raws, results, strict=True):
        assert "must be one JSON object" in result.error
        assert raw in orjson.loads(result.text)["error"]
        assert result.arguments == raw
    assert counts(results, "terminal") == (5, 0, 5)
    assert await tools.shell("echo goes on") == "goes on\n"


async def test_mr_05_malformed_arguments_are_not_run_as_nothing(tools: Bench) -> None:
    raw = '{"command": "rm -r build" "cwd": '
    await tools.shell("mkdir build")
    result = await tools.result("terminal", raw)
    assert "not valid JSON" in result.error
    assert result.arguments == raw
    assert not result.valid
    assert await tools.shell("ls") == "build\n"


async def test_mr_07_backslash_n_outside_strings(tools: Bench) -> None:
    raw = '{"path": "/w/a.py", "view_range": \\n[1, 20]\\n\\n}'
    for _ in range(2):  # a replay fails in the same way
        result = await tools.result("read_file", raw)
        assert "not valid JSON" in result.error
        assert result.arguments == raw


async def test_mr_09_truncated_arguments(tools: Bench) -> None:
    raw = '{"path": "a.md", "content": "# Title\\nfirst half'
    result = await tools.result("write_file", raw)
    assert "in the middle of a string" in result.error
    assert "truncated" in result.error
    assert (result.ok, result.valid, result.arguments) == (False, False, raw)
    assert await tools.shell("ls") == ""


# ---- calls and results


async def test_mr_22_each_call_gets_its_own_result_whatever_its_id(tools: Bench) -> None:
    """The ids are made unique by the session; the toolbox must not confuse calls even where they are not."""
    calls = [ToolCall(id="f:1", name="terminal", arguments=json.dumps({"command": f"echo {x}"})) for x in "AB"]
    first = await tools.toolbox.call_all(calls)
    second = await tools.toolbox.call_all([ToolCall(id="f:1", name="terminal", arguments='{"command": "echo C"}')])
    assert [orjson.loads(result.text)["output"] for result in first + second] == ["A\n", "B\n", "C\n"]
    assert counts(first + second, "terminal") == (3, 3, 0)


async def test_mr_25_the_same_tool_twice_in_one_turn() -> None:
    @tool(parallel=True)
    async def web_search(q: str) -> dict[str, Any]:
        return {"found": q}

    async with bench(web_search, toolsets=()) as tools:
        results = await tools.all(("web_search", {"q": "X"}), ("web_search", {"q": "Y"}))
    assert [result.text for result in results] == ['{"found":"X"}', '{"found":"Y"}']
    assert [result.call_id for result in results] == ["c1", "c2"]
    assert counts(results, "web_search") == (2, 2, 0)


async def test_mr_27_a_tool_that_does_not_exist(tools: Bench) -> None:
    unknown, fine = await tools.all(("browser_magic_click", "{}"), ("terminal", {"command": "echo hi"}))
    assert "Available tools: terminal, process, read_file, write_file, patch, search_files" in unknown.error
    assert orjson.loads(unknown.text) == {"error": unknown.error}
    assert (unknown.known, unknown.valid, unknown.ok) == (False, False, False)
    assert orjson.loads(fine.text)["output"] == "hi\n"


def test_te_10_truncation_in_the_middle_of_a_character() -> None:
    signs = "é€😀👨‍👩‍👧"  # of two, three and four bytes, and one of five code points
    raw = (signs * 100_000).encode()
    for shift_head in range(21):
        for shift_tail in (0, 1, 2, 3, 7, 20) if shift_head % 5 else range(21):
            head, tail = raw[: OUTPUT_HEAD - shift_head], raw[-(OUTPUT_TAIL - shift_tail) :]
            dropped = len(raw) - len(head) - len(tail)
            shown, binary = decode_output(head + tail, dropped, len(head), TERMINAL_LIMIT)
            assert len(shown) <= TERMINAL_LIMIT
            assert "\ufffd" not in shown
            assert not binary
            first, last = shown.split("\n\n[…")[0], shown.split("…]\n\n")[1]
            assert first.endswith(("é", "€", "😀", "👧")) and not first.endswith("\u200d")
            assert last.startswith(("é", "€", "😀", "👨"))


async def test_te_11_binary_output_and_nul_bytes(tools: Bench) -> None:
    for command in ("head -c 4096 /dev/urandom", "printf 'a\\0b'", "cat /bin/ls | head -c 2000"):
        result = await tools.result("terminal", {"command": command})
        assert result.ok
        assert "\0" not in result.text
        line = json.dumps({"value": result.text})
        assert "\n" not in line
        shown = orjson.loads(result.text)
        assert shown["exit_code"] == 0
        assert "xxd" in shown["note"]
    assert (await tools.run("terminal", command="printf 'a\\0b'"))["output"] == "a\\x00b"


async def test_te_12_output_in_another_encoding(tools: Bench) -> None:
    shown = await tools.run("terminal", command="printf '\\xd6\\xd0\\xce\\xc4'")
    assert set(shown["output"]) == {"\ufffd"}
    shown = await tools.run("terminal", command="printf '\\xff\\xfe\\x41\\x00'")
    assert shown["output"] == "\ufffd\ufffdA\\x00"


async def test_te_14_a_tool_that_returns_nothing() -> None:
    outputs: list[Any] = [None, [], "", {}, 0, False]
    async with bench(gives("give", *outputs), toolsets=()) as tools:
        results = [await tools.result("give", {}) for _ in outputs]
    assert all(result.text.strip() for result in results)
    assert [result.text for result in results[1:]] == ["[]", results[0].text, "{}", "0", "false"]


async def test_te_15_nul_inside_an_argument(tools: Bench) -> None:
    command, path = await tools.all(("terminal", {"command": "echo a\0b"}), ("read_file", {"path": "/tmp/a\0b"}))
    for result in (command, path):
        assert not result.ok
        assert "NUL" in result.error
        assert "\0" not in result.text + result.arguments
    assert await tools.shell("echo goes on") == "goes on\n"


async def test_te_16_one_result_larger_than_the_context(tools: Bench) -> None:
    shown = await tools.run("terminal", command="seq 1 3000000")
    assert len(shown["output"]) <= TERMINAL_LIMIT
    assert shown["output"].startswith("1\n2\n")
    assert shown["output"].endswith("2999999\n3000000\n")
    assert "bytes left out" in shown["output"]
    async with bench(gives("huge", "x" * 5_000_000)) as other:
        assert len((await other.result("huge", {})).text) <= RESULT_LIMIT


# ---- what counts as a failure


async def test_st_02_a_non_zero_exit_code_is_no_failure(tools: Bench) -> None:
    commands = ["grep nothing /etc/hostname", "false", "diff /etc/hostname /etc/passwd", "no_such_command"]
    results = await tools.all(*(("terminal", {"command": command}) for command in commands))
    assert [orjson.loads(result.text)["exit_code"] for result in results] == [1, 1, 1, 127]
    assert counts(results, "terminal") == (4, 4, 0)
    failures = await tools.all(("terminal", {"command": "sleep 20", "timeout": 1}), ("terminal", {"cmd": "ls"}))
    assert counts(failures, "terminal") == (2, 0, 2)


async def test_st_03_file_content_is_not_taken_for_an_error(tools: Bench) -> None:
    for text in (
        "HTTP 404 handling guide: on timeout return error: retry",
        "Error: this is the first line of a log file that read_file returned",
        '{"error": "what a file says"}',
    ):
        await tools.run("write_file", path="f", content=text)
        results = await tools.all(("read_file", {"path": "f"}), ("terminal", {"command": "cat f"}))
        assert [result.ok for result in results] == [True, True]
        assert [result.error for result in results] == ["", ""]


async def test_st_07_duplicate_ids_do_not_distort_the_counts() -> None:
    async with bench(gives("web_search", {"error": "down"})) as tools:
        results = await tools.toolbox.call_all(
            [
                ToolCall(id="x", name="terminal", arguments='{"command": "echo ok"}'),
                ToolCall(id="x", name="web_search", arguments="{}"),
            ]
        )
    assert counts(results, "terminal") == (1, 1, 0)
    assert counts(results, "web_search") == (1, 0, 1)


async def test_st_10_a_tool_that_always_fails_shows_in_the_counts() -> None:
    failing = gives("web_search", *[ConnectionError("no route to the search engine")] * 5)
    async with bench(failing, toolsets=()) as tools:
        results = await tools.all(*[("web_search", {"q": "x"})] * 5)
    assert counts(results, "web_search") == (5, 0, 5)
    assert all(result.valid for result in results)
