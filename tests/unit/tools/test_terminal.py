"""terminal and process, in a real sandbox."""

from __future__ import annotations

import asyncio
import time

import pytest

from gristmill.tools import terminal
from support.toolboxes import Bench, bench


async def test_a_command_gives_output_exit_code_and_no_error(tools: Bench) -> None:
    assert await tools.run("terminal", command="echo out; echo err >&2; exit 3") == {
        "output": "out\nerr\n",
        "exit_code": 3,
        "error": None,
    }


async def test_directory_and_variables_stay_and_workdir_does_not(tools: Bench) -> None:
    await tools.shell("mkdir -p a/b && cd a && export X=1")
    assert await tools.shell("basename $PWD; echo $X") == "a\n1\n"
    shown = await tools.run("terminal", command="basename $PWD", workdir="b")
    assert shown["output"] == "b\n"
    assert await tools.shell("basename $PWD") == "a\n"
    missing = await tools.run("terminal", command="touch no", workdir="nowhere")
    assert missing["exit_code"] == 1
    assert await tools.shell("ls") == "b\n"


async def test_calls_of_one_turn_share_the_shell_in_order(tools: Bench) -> None:
    results = await tools.all(*(("terminal", {"command": f"export X=${{X:-}}{n}; echo $X"}) for n in range(4)))
    assert ['"output":"0123\\n"' in result.text for result in results] == [False, False, False, True]


async def test_a_timeout_is_an_error_and_keeps_the_output(tools: Bench) -> None:
    begun = time.monotonic()
    result = await tools.result("terminal", {"command": "echo before; sleep 30", "timeout": 1})
    assert 1 <= time.monotonic() - begun < 8
    assert not result.ok
    assert '"output":"before\\n","exit_code":124' in result.text
    assert "timed out after 1 s" in result.error


async def test_the_default_timeout_is_the_settings() -> None:
    async with bench() as made:
        made.context.terminal_timeout = 0.3
        assert "timed out after 0.3 s" in (await made.run("terminal", command="sleep 30"))["error"]


async def test_a_note_is_no_failure(tools: Bench) -> None:
    await tools.shell("mkdir d && cd d && rmdir ../d")
    result = await tools.result("terminal", {"command": "echo here"})
    assert result.ok
    assert '"output":"here\\n"' in result.text
    assert '"note":"' in result.text


async def test_a_background_process_is_looked_after(tools: Bench) -> None:
    started = await tools.run("terminal", command="while read -r x; do echo got $x; done; exit 4", background=True)
    assert started["exit_code"] == 0 and started["error"] is None and started["pid"] > 0
    name = started["session_id"]
    listed = (await tools.run("process", action="list"))["processes"]
    assert [(each["session_id"], each["status"], each["exit_code"]) for each in listed] == [(name, "running", None)]

    assert (await tools.run("process", action="submit", session_id=name, data="one"))["status"] == "running"
    await tools.run("process", action="write", session_id=name, data="two\nthr")
    await tools.run("process", action="submit", session_id=name, data="ee")
    waited = await tools.run("process", action="wait", session_id=name, timeout=1)
    assert waited["status"] == "running"
    assert "still running after 1 s" in waited["note"]
    assert waited["output"] == "got one\ngot two\ngot three\n"
    assert "error" not in waited

    await tools.run("process", action="close", session_id=name)
    ended = await tools.run("process", action="wait", session_id=name, timeout=20)
    assert (ended["status"], ended["exit_code"]) == ("exited", 4)
    refused = await tools.result("process", {"action": "write", "session_id": name, "data": "more"})
    assert not refused.ok
    assert "no more input" in refused.error


async def test_log_pages_through_the_output(tools: Bench) -> None:
    name = (await tools.run("terminal", command="seq 1 500", background=True))["session_id"]
    await tools.run("process", action="wait", session_id=name, timeout=20)
    last = await tools.run("process", action="log", session_id=name)
    assert last["output"].splitlines() == [str(n) for n in range(301, 501)]
    assert (last["total_lines"], last["first_line"], last["truncated"]) == (500, 301, True)
    page = await tools.run("process", action="log", session_id=name, offset=3, limit=2)
    assert page["output"] == "3\n4"
    beyond = await tools.run("process", action="log", session_id=name, offset=900)
    assert (beyond["output"], beyond["first_line"]) == ("", 0)
    glance = await tools.run("process", action="poll", session_id=name)
    assert len(glance["output"]) <= terminal.GLANCE_LIMIT
    assert glance["output"].endswith("500\n")


async def test_kill_ends_the_whole_tree(tools: Bench) -> None:
    command = "sleep 987 & echo $! > child; wait"
    name = (await tools.run("terminal", command=command, background=True))["session_id"]
    await tools.shell("until [ -s child ]; do sleep 0.02; done; kill -0 $(cat child)")
    killed = await tools.run("process", action="kill", session_id=name)
    assert await tools.shell("cat /proc/$(cat child)/cmdline 2>/dev/null; true") == ""  # gone, or not yet reaped
    assert (killed["status"], killed["exit_code"]) == ("exited", 137)
    again = await tools.run("process", action="kill", session_id=name)
    assert "already ended" in again["note"]


async def test_unknown_processes_are_answered_with_the_known(tools: Bench) -> None:
    none = await tools.result("process", {"action": "poll", "session_id": "7"})
    assert not none.ok
    assert "No background process was started" in none.error
    name = (await tools.run("terminal", command="true", background=True))["session_id"]
    other = await tools.result("process", {"action": "poll", "session_id": "nope"})
    assert f"There is no process 'nope'. Known are {name}." in other.error
    assert "needs a session_id" in (await tools.result("process", {"action": "kill"})).error


async def test_a_server_in_the_background_answers_the_next_call(tools: Bench) -> None:
    server = (
        "exec python3 -c 'import http.server as h; "
        's = h.HTTPServer(("127.0.0.1", 0), h.SimpleHTTPRequestHandler); '
        'open("port", "w").write(str(s.server_port)); s.serve_forever()\''
    )
    await tools.run("terminal", command=server, background=True)
    fetch = (
        "until [ -s port ]; do sleep 0.05; done; "
        "exec 3<>/dev/tcp/127.0.0.1/$(cat port); printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
    )
    assert "200 OK" in (await tools.run("terminal", command=fetch, timeout=20))["output"]


async def test_only_so_many_background_processes(tools: Bench) -> None:
    limit = terminal.JOB_LIMIT
    results = await tools.all(*(("terminal", {"command": "sleep 50", "background": True}) for _ in range(limit + 1)))
    assert [result.ok for result in results] == [True] * limit + [False]
    assert f"{limit} background processes are running already" in results[-1].error
    names = [each["session_id"] for each in (await tools.run("process", action="list"))["processes"]]
    await tools.run("process", action="kill", session_id=names[3])
    assert (await tools.run("terminal", command="sleep 50", background=True))["error"] is None
    now = [each["session_id"] for each in (await tools.run("process", action="list"))["processes"]]
    assert names[3] not in now and len(now) == limit


async def test_input_that_nobody_reads_does_not_hang(tools: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "INPUT_SECONDS", 0.2)
    name = (await tools.run("terminal", command="exec sleep 50", background=True))["session_id"]
    async with asyncio.timeout(20):
        result = await tools.result("process", {"action": "write", "session_id": name, "data": "x" * 1_000_000})
    assert "did not read its input" in result.error
