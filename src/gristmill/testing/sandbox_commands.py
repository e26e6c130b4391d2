"""The conformance suite's first half: commands, output, jobs and files. `sandbox_suite` is what an adapter runs."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gristmill.sandbox.base import OUTPUT_HEAD, OUTPUT_TAIL, Sandbox, SandboxProvider
from gristmill.testing.boxes import running, soon, started, text, unique_sleep

BINARY = bytes(range(256)) * 40


class CommandSuite:
    """What a session does all day."""

    @pytest.fixture
    async def box(self, provider: SandboxProvider) -> AsyncIterator[Sandbox]:
        async with started(provider) as sandbox:
            yield sandbox

    # Commands.

    async def test_output_is_one_stream_in_order(self, box: Sandbox) -> None:
        result = await box.exec("echo one; echo two >&2; echo three; exit 7", timeout=10)
        assert (result.output, result.exit_code) == (b"one\ntwo\nthree\n", 7)
        assert not result.timed_out and not result.dropped and not result.note and 0 < result.seconds < 10

    @pytest.mark.parametrize(
        ("command", "code"),
        [
            ("exit 3", 3),
            ("exec false", 1),
            ("kill -9 $$", 137),
            ("kill -TERM $$", 143),
            ("set -euo pipefail; true", 0),
            ("set -e; false; echo no", 1),
            ("echo 'unclosed", 2),
            ("no-such-program-anywhere", 127),
            ("exec >&- 2>&-; sleep 0.05; exit 4", 4),
            ("trap 'exit 9' EXIT; exit 4", 9),
            ("set -o noclobber; set -u; true", 0),
        ],
    )
    async def test_exit_codes_and_the_next_command_works(self, box: Sandbox, command: str, code: int) -> None:
        assert (await box.exec(command, timeout=10)).exit_code == code
        assert await text(box, "echo next") == "next"

    async def test_directory_and_exported_variables_persist(self, box: Sandbox) -> None:
        await box.exec("mkdir -p a/b; cd a/b; export V=$'two\\nlines \"q\" $x'; local=no; f() { :; }", timeout=10)
        assert await text(box, 'pwd; printf "%s|%s" "$V" "$local"; cd - >/dev/null; pwd') == (
            f'{box.workspace}/a/b\ntwo\nlines "q" $x|{box.workspace}'
        )
        await box.exec("unset V; exit 5", timeout=10)
        assert await text(box, 'echo "${V-unset}"; pwd') == f"unset\n{box.workspace}"

    async def test_a_stateless_command_sees_but_changes_nothing(self, box: Sandbox) -> None:
        await box.exec("export V=1; mkdir d; cd d", timeout=10)
        result = await box.exec("pwd; echo $V; cd /; export V=2", timeout=10, stateful=False)
        assert result.output.decode() == f"{box.workspace}/d\n1\n"
        assert await text(box, "pwd; echo $V") == f"{box.workspace}/d\n1"

    async def test_stateless_commands_run_beside_a_stateful_one(self, box: Sandbox) -> None:
        slow = asyncio.create_task(box.exec("sleep 4; echo slow", timeout=20))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        results = await asyncio.gather(*(box.exec("echo quick", timeout=10, stateful=False) for _ in range(4)))
        assert [r.output for r in results] == [b"quick\n"] * 4 and time.monotonic() - began < 3.9 and not slow.done()
        assert (await slow).output == b"slow\n"

    async def test_workdir_is_for_one_command_only(self, box: Sandbox) -> None:
        await box.exec("mkdir -p 'a b/c'", timeout=10)
        assert (await box.exec("pwd", timeout=10, workdir="a b")).output.decode() == f"{box.workspace}/a b\n"
        assert await text(box, "pwd") == box.workspace
        await box.exec("cd c", timeout=10, workdir="a b")
        assert await text(box, "pwd") == f"{box.workspace}/a b/c"

    async def test_a_missing_workdir_runs_nothing(self, box: Sandbox) -> None:
        result = await box.exec("true; touch ran; true & wait; touch ran", timeout=10, workdir="missing")
        assert result.exit_code == 1 and b"missing" in result.output
        assert await text(box, "ls") == ""

    async def test_a_directory_that_vanished_is_noted(self, box: Sandbox) -> None:
        await box.exec("mkdir gone; cd gone; rmdir ../gone", timeout=10)
        result = await box.exec("pwd", timeout=10)
        assert result.output.decode() == f"{box.workspace}\n" and "gone" in result.note
        assert not (await box.exec("pwd", timeout=10)).note

    async def test_stdin_is_what_was_given_and_then_ends(self, box: Sandbox) -> None:
        assert (await box.exec("cat; read x; echo end", timeout=10)).output == b"end\n"
        data = random.Random(1).randbytes(3_000_000)
        result = await box.exec("sha256sum", timeout=20, stdin=data)
        assert result.output.split()[0].decode() == hashlib.sha256(data).hexdigest()

    async def test_a_long_command(self, box: Sandbox) -> None:
        body = "x" * 600_000
        assert await text(box, f"wc -c <<'END'\n{body}\nEND\necho '\"$(done)`'") == '600001\n"$(done)`'

    async def test_nul_bytes_are_refused(self, box: Sandbox) -> None:
        for broken in (
            box.exec("echo a\0b", timeout=5),
            box.spawn("a\0b"),
            box.read("a\0b", 1),
            box.write("a\0b", b""),
        ):
            with pytest.raises(ValueError, match="NUL"):
                await broken

    # Output.

    async def test_binary_output_is_exact(self, box: Sandbox) -> None:
        assert (await box.exec("cat", timeout=10, stdin=BINARY)).output == BINARY

    async def test_long_output_keeps_head_and_tail(self, box: Sandbox) -> None:
        result = await box.exec("seq 1 400000", timeout=20)
        whole = b"".join(b"%d\n" % n for n in range(1, 400_001))
        assert result.output == whole[:OUTPUT_HEAD] + whole[-OUTPUT_TAIL:]
        assert result.dropped == len(whole) - OUTPUT_HEAD - OUTPUT_TAIL

    async def test_endless_output_stays_bounded_and_starves_nobody(self, box: Sandbox) -> None:
        waits = []

        async def others() -> None:
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.005)
                waits.append(time.monotonic() - began)

        beside = asyncio.create_task(others())
        result = await box.exec("yes", timeout=1)
        beside.cancel()
        assert result.timed_out and result.exit_code == 124
        assert len(result.output) == OUTPUT_HEAD + OUTPUT_TAIL and result.dropped > 1_000_000
        assert sorted(waits)[len(waits) // 2] < 0.05

    # Time and background processes.

    async def test_a_timeout_kills_the_whole_tree_and_nothing_else(self, box: Sandbox) -> None:
        earlier, job_sleep = unique_sleep(), unique_sleep()
        plain, detached, twice = unique_sleep(), unique_sleep(), unique_sleep()
        await box.exec(f"{earlier} & echo", timeout=10)
        job = await box.spawn(f"exec {job_sleep}")
        began = time.monotonic()
        command = f"echo before; trap '' TERM; setsid {detached} & (({twice} &) &); {plain}; echo after"
        result = await box.exec(command, timeout=2)
        assert time.monotonic() - began < 12
        assert (result.timed_out, result.exit_code, result.output) == (True, 124, b"before\n")
        assert not running(plain) and not running(detached) and not running(twice)
        assert await text(box, f"pgrep -fc '^{earlier}'; pgrep -fc '^{job_sleep}'; exit 0") == "1\n1"
        assert job.exit_code is None

    async def test_a_timeout_keeps_the_state_of_before(self, box: Sandbox) -> None:
        await box.exec("export V=1", timeout=10)
        await box.exec("export V=2; cd /; sleep 60", timeout=0.2)
        assert await text(box, "echo $V; pwd") == f"1\n{box.workspace}"

    @pytest.mark.parametrize(
        "command", ["{} & echo up", "({}) & echo up; exit 0", "setsid {} >/dev/null 2>&1 & disown; echo up"]
    )
    async def test_a_background_child_does_not_hold_the_command(self, box: Sandbox, command: str) -> None:
        sleep = unique_sleep()
        began = time.monotonic()
        result = await box.exec(command.format(sleep), timeout=20)
        assert (result.output, result.exit_code) == (b"up\n", 0) and time.monotonic() - began < 3
        await box.stop()
        assert not running(sleep)

    async def test_a_background_writer_lives_on_when_nobody_reads(self, box: Sandbox) -> None:
        await box.exec("(while :; do echo log line || touch died; done) & echo $! > pid", timeout=10)
        await asyncio.sleep(0.3)
        assert await text(box, "kill -0 $(cat pid) && echo alive; ls") == "alive\npid"

    @pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the server of this test is Python's")
    async def test_a_server_answers_on_localhost_to_the_next_command(self, box: Sandbox) -> None:
        await box.exec("echo hello > index.html", timeout=10)
        server = (
            "import http.server as h; s = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
            "open('port', 'w').write(str(s.server_port)); s.serve_forever()"
        )
        await box.exec(f'python3 -c "{server}" & while [ ! -s port ]; do sleep 0.02; done', timeout=10)
        fetch = "exec 3<>/dev/tcp/127.0.0.1/$(cat port); printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; tail -n 1 <&3"
        assert await text(box, fetch) == "hello"

    async def test_a_job_reads_writes_and_ends(self, box: Sandbox) -> None:
        await box.exec("export V=5; mkdir d; cd d", timeout=10)
        job = await box.spawn('echo "$V $PWD"; while read -r line; do echo "got $line"; done; exit 6')
        assert job.pid > 0 and abs(job.started - time.time()) < 60
        await job.write(b"one\n")
        assert await soon(lambda: b"got one" in job.output()[0])
        assert not await job.wait(0.05)
        await job.close_stdin()
        await job.close_stdin()
        with pytest.raises(BrokenPipeError):
            await job.write(b"two\n")
        assert await job.wait(10) and job.exit_code == 6
        assert job.output() == (f"5 {box.workspace}/d\ngot one\n".encode(), 0)

    async def test_a_job_takes_more_than_a_pipe_holds(self, box: Sandbox) -> None:
        job = await box.spawn("sleep 0.1; sha256sum")
        data = random.Random(2).randbytes(500_000)
        await job.write(data)
        await job.close_stdin()
        assert await job.wait(10) and job.output()[0].split()[0].decode() == hashlib.sha256(data).hexdigest()

    async def test_killing_a_job_kills_its_tree(self, box: Sandbox) -> None:
        one, two = unique_sleep(), unique_sleep()
        job = await box.spawn(f"setsid {one} & {two}")
        assert await soon(lambda: bool(running(one) and running(two)))
        await job.kill()
        await job.kill()
        assert not running(one) and not running(two)
        assert job.exit_code == 137 and await job.wait(0)
        with pytest.raises(BrokenPipeError):
            await job.write(b"x")

    async def test_a_job_that_is_killed_from_inside_ends(self, box: Sandbox) -> None:
        job = await box.spawn("kill -9 $$")
        assert await job.wait(10) and job.exit_code == 137

    # Files.

    async def test_files_come_back_as_they_were_written(self, box: Sandbox) -> None:
        await box.write("new/dir/a b'\"\n.bin", BINARY)
        assert await box.read("new/dir/a b'\"\n.bin", 1_000_000) == BINARY
        assert await box.read("new/dir/a b'\"\n.bin", 10) == BINARY[:10]
        await box.exec("cd new; printf '#!/bin/sh\\necho old' > x.sh; chmod 750 x.sh", timeout=10)
        await box.write("x.sh", b"")
        assert await box.read("x.sh", 10) == b""
        await box.write(f"{box.workspace}/new/x.sh", b"#!/bin/sh\necho new\n")
        assert await text(box, "stat -c %a x.sh; ./x.sh; ls ~- >/dev/null; ls") == "750\nnew\ndir\nx.sh"

    async def test_a_large_file(self, box: Sandbox) -> None:
        data = random.Random(3).randbytes(4_000_000)
        await box.write("large", data)
        assert await box.read("large", 5_000_000) == data

    async def test_file_errors_are_told_apart(self, box: Sandbox) -> None:
        await box.exec("mkdir d; mkfifo p; echo x > f; ln -s nowhere l", timeout=10)
        for path, error in {
            "none": FileNotFoundError,
            "l": FileNotFoundError,
            "d": IsADirectoryError,
            "p": PermissionError,
        }.items():
            with pytest.raises(error):
                await box.read(path, 10)
        for target, error in {"d": IsADirectoryError, "p": PermissionError, "f/below": NotADirectoryError}.items():
            with pytest.raises(error):
                await box.write(target, b"x")
        assert await text(box, "cat f") == "x"
