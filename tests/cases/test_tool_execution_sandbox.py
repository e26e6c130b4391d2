"""Bug cases of tool execution and sandboxes, at the sandbox: `local` and `host` alike where no isolation is meant."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gristmill.sandbox.base import OUTPUT_HEAD, OUTPUT_TAIL, Sandbox, SandboxProvider
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.host import HostSandboxes
from gristmill.sandbox.lazy import LazySandbox
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep


@pytest.fixture(params=[BubblewrapSandboxes, HostSandboxes], ids=["local", "host"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxProvider]:
    provider = request.param(tmp_path)
    yield provider
    provider.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[SandboxProvider]:
    provider = BubblewrapSandboxes(tmp_path)
    yield provider
    provider.close()


@pytest.fixture
async def box(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    async with started(provider) as sandbox:
        yield sandbox


async def test_te_01_background_child_keeps_the_output_pipe_open(box: Sandbox) -> None:
    """TE-01: a command ends with its shell, and its children with the sandbox."""
    sleep = unique_sleep()
    for command, printed in {
        f"{sleep} & echo started": "started",
        f"({sleep}) & echo parent-done; exit 0": "parent-done",
        f"setsid {sleep} > /dev/null 2>&1 < /dev/null & disown; echo ok": "ok",
        f"nohup {sleep} & echo up": "up",
    }.items():
        began = time.monotonic()
        result = await box.exec(command, timeout=30)
        assert (result.output.decode().splitlines()[-1], result.exit_code) == (printed, 0)
        assert time.monotonic() - began < 3
    assert await soon(lambda: len(running(sleep)) == 4)
    await box.stop()
    assert running(sleep) == []


async def test_te_02_command_reads_standard_input(box: Sandbox) -> None:
    """TE-02: stdin is empty."""
    began = time.monotonic()
    outputs = [await text(box, command) for command in ("cat", "python3", "read x; echo got $x", "grep foo")]
    assert outputs == ["", "", "got", ""]
    assert time.monotonic() - began < 4


async def test_te_04_package_managers_and_sudo_ask_questions(box: Sandbox) -> None:
    """TE-04: what asks gets no answer, at once."""
    for command in ("sudo -k; sudo true </dev/tty", "printf 'Proceed? [Y/n] ' && read a && read b </dev/tty"):
        result = await box.exec(command, timeout=20)
        assert result.exit_code != 0 and result.seconds < 5
    assert await text(box, "echo $DEBIAN_FRONTEND $GIT_TERMINAL_PROMPT $PAGER $TERM; tty") == (
        "noninteractive 0 cat dumb\nnot a tty"
    )


async def test_te_05_unfinished_heredoc_or_quote(box: Sandbox) -> None:
    """TE-05: the shell says what is wrong at once, and the next command starts clean."""
    heredoc = await box.exec("cat <<'EOF'\nhello", timeout=10)
    assert b"here-document" in heredoc.output and b"wanted `EOF'" in heredoc.output and heredoc.seconds < 3
    quote = await box.exec("echo 'unclosed", timeout=10)
    assert quote.exit_code == 2 and b"unexpected EOF" in quote.output and quote.seconds < 3
    assert await text(box, "python3 - <<'PY'\nprint(1)\nPY") == "1"
    assert await text(box, "git --version >/dev/null; echo done # trailing comment") == "done"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("set -euo pipefail; true", 0),
        ("exec false", 1),
        ("sleep 100 & exit 1", 1),
        ("kill -9 $$", 137),
        ("trap '' TERM; sleep 600", 124),
    ],
)
async def test_te_06_command_changes_the_shell_it_runs_in(box: Sandbox, command: str, code: int) -> None:
    """TE-06: it is the command's own shell."""
    result = await box.exec(command, timeout=0.5 if code == 124 else 10)
    assert (result.exit_code, result.timed_out) == (code, code == 124)
    after = await box.exec('echo "$unset"; false; echo after', timeout=10)
    assert (after.output, after.exit_code) == (b"\nafter\n", 0)


async def test_te_07_working_directory_removed(box: Sandbox) -> None:
    """TE-07: the next command runs elsewhere and says so."""
    await box.exec("mkdir -p d && cd d && rm -rf ../d", timeout=10)
    result = await box.exec("pwd; ls", timeout=10)
    assert (result.exit_code, result.output.decode()) == (0, f"{box.workspace}\n")
    assert "d no longer exists" in result.note
    assert await text(box, "cd / && echo back") == "back"


async def test_te_08_command_list_in_a_missing_directory(box: Sandbox) -> None:
    """TE-08: in a directory that is missing nothing runs, in one that is there everything."""
    missing = await box.exec("true; pwd > marker", timeout=10, workdir="missing")
    assert missing.exit_code == 1 and await text(box, "ls") == ""
    await box.exec("mkdir project", timeout=10)
    await box.exec("true & wait; pwd > marker", timeout=10, workdir="project")
    assert await text(box, "cat project/marker; ls") == f"{box.workspace}/project\nproject"


@pytest.mark.parametrize(
    ("command", "size", "timeout"),
    [
        ("yes", 0, 1.0),
        ("timeout 0.5 yes", 0, 20.0),
        ("head -c 300000000 /dev/zero", 300_000_000, 20.0),
        ("seq 1 5000000", 38_888_896, 20.0),
    ],
)
async def test_te_09_endless_output(box: Sandbox, command: str, size: int, timeout: float) -> None:
    """TE-09: head and tail are kept, memory is not used up, the time limit holds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await box.exec(command, timeout=timeout)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 30_000  # KiB
    assert len(result.output) == OUTPUT_HEAD + OUTPUT_TAIL
    assert result.timed_out == (command == "yes") and result.seconds < timeout + 5
    total = result.dropped + len(result.output)
    assert total == size if size else total > 1_000_000


async def test_te_10_no_byte_is_lost_or_added_at_the_cuts(box: Sandbox) -> None:
    """TE-10: bytes are kept as they are, so whoever decodes them can cut between characters."""
    piece = "é€😀".encode()
    result = await box.exec("cat", timeout=20, stdin=piece * 100_000)
    whole = piece * 100_000
    assert result.output == whole[:OUTPUT_HEAD] + whole[-OUTPUT_TAIL:]
    assert result.dropped == len(whole) - OUTPUT_HEAD - OUTPUT_TAIL


async def test_te_11_binary_output_and_nul_bytes(box: Sandbox) -> None:
    """TE-11: bytes come through as they were printed."""
    assert (await box.exec("printf 'a\\0b'", timeout=10)).output == b"a\0b"
    noise = os.urandom(4096)
    assert (await box.exec("cat", timeout=10, stdin=noise)).output == noise
    assert (await box.exec("head -c 2000 /bin/ls", timeout=10)).output == Path("/bin/ls").read_bytes()[:2000]


async def test_te_12_output_in_another_encoding(box: Sandbox) -> None:
    """TE-12: no decoding happens here, so none can fail."""
    assert (await box.exec("printf '\\xd6\\xd0\\xce\\xc4'", timeout=10)).output == b"\xd6\xd0\xce\xc4"
    assert (await box.exec("printf '\\xff\\xfe\\x41\\x00'", timeout=10)).output == b"\xff\xfe\x41\x00"


async def test_te_15_nul_inside_an_argument(box: Sandbox) -> None:
    """TE-15: refused before anything runs; lone surrogates are not."""
    with pytest.raises(ValueError, match="NUL"):
        await box.exec("echo a\0b", timeout=10)
    with pytest.raises(ValueError, match="NUL"):
        await box.read("/tmp/a\0b", 10)
    assert await text(box, "echo '\ud83d'") == "?"
    assert await text(box, "echo next") == "next"


async def test_sb_05_two_rows_share_one_sandbox(local: SandboxProvider) -> None:
    """SB-05: files, variables and processes of one session are not in another, at the same time or after it."""
    sleep = unique_sleep()
    look = f"cat /tmp/x ~/x x 2>/dev/null; echo $V; pgrep -f '^{sleep}'"
    async with started(local) as first:
        await first.exec(f"echo A > /tmp/x; echo A > ~/x; echo A > x; export V=A; {sleep} &", timeout=10)
        async with started(local) as beside, started(local, cwd="/tmp") as in_tmp:
            assert await text(beside, look) == "" and await text(in_tmp, look) == ""
    async with started(local, cwd="/tmp") as after:
        assert await text(after, look) == "" and not running(sleep)


async def test_sb_06_two_first_calls_create_the_sandbox_twice(provider: SandboxProvider, tmp_path: Path) -> None:
    """SB-06: six calls that come first at the same time start one sandbox."""
    box = LazySandbox(provider.make(spec()))
    results = await asyncio.gather(*(box.exec("hostname; pwd", timeout=20) for _ in range(6)))
    assert len({result.output for result in results}) == 1
    assert len(list(tmp_path.glob("gristmill-*/s-*"))) == 1
    await box.stop()
    assert list(tmp_path.glob("gristmill-*/s-*")) == []


async def test_sb_08_the_harness_kills_too_much(provider: SandboxProvider) -> None:
    """SB-08: only what the sandbox started is killed, however much another process looks like it."""
    sleep = unique_sleep()
    bystander = subprocess.Popen(sleep.split())
    try:
        async with started(provider) as box:
            result = await box.exec(f"echo before; {sleep}", timeout=0.4)
            assert result.timed_out and result.output == b"before\n"
            assert running(sleep) == [bystander.pid]
            await box.spawn(sleep)
        assert running(sleep) == [bystander.pid]
    finally:
        bystander.kill()
        bystander.wait()


async def test_sb_09_api_keys_end_up_in_the_dataset(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SB-09: no command finds a key of the runner's environment, nor does any file of the sandbox on the host."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1234567890")
    async with started(provider) as box:
        for command in (
            "env",
            "cat /proc/self/environ",
            "python3 -c 'import os; print(os.environ)'",
            "cat /proc/$PPID/environ | tr '\\0' '\\n'",
        ):
            assert "canary" not in await text(box, command)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]
