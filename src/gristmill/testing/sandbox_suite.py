"""The conformance suite of sandboxes: what the port promises, as tests for any adapter.

```python
class TestMySandboxes(SandboxSuite):
    @pytest.fixture
    def provider(self):
        provider = MySandboxes()
        yield provider
        provider.close()
```
Needs pytest with pytest-asyncio in its auto mode. What an adapter's `capabilities` do not promise is skipped. Some
tests look for the processes of a sandbox in this machine's /proc; for a remote one they prove less.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import time
from pathlib import Path

import pytest

from gristmill.errors import SandboxError
from gristmill.sandbox.base import STOP_SECONDS, Sandbox, SandboxProvider
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.testing.sandbox_commands import CommandSuite
from gristmill.types import Limits


class SandboxSuite(CommandSuite):
    """Override the fixture `provider`."""

    @pytest.fixture
    def provider(self) -> SandboxProvider:
        raise NotImplementedError("Override the fixture `provider`.")

    # Environment and isolation.

    async def test_only_the_specs_variables_enter(
        self, provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1234567890")
        async with started(provider, env={"GIVEN": "a 'b'\n$c"}) as box:
            assert await text(box, 'printf %s "$GIVEN"') == "a 'b'\n$c"
            for command in ("env", "cat /proc/self/environ", "export -p; set", "cat /proc/$PPID/environ; exit 0"):
                assert "canary" not in (await box.exec(command, timeout=10)).output.decode(errors="replace")

    async def test_nothing_waits_for_a_terminal(self, box: Sandbox) -> None:
        began = time.monotonic()
        for command in ("sudo -k; sudo true", "read x </dev/tty", "git log", "python3", "su -c id"):
            await box.exec(command, timeout=20)
        assert time.monotonic() - began < 8

    async def test_the_specs_working_directory(self, provider: SandboxProvider) -> None:
        for cwd in ("some/where", "./some/where/"):
            async with started(provider, cwd=cwd) as box:
                assert await text(box, "pwd; touch here") == f"{box.workspace}/some/where"
        async with started(provider, cwd="/usr") as box:
            assert await text(box, "pwd") == "/usr"
        broken = provider.make(spec(cwd="/no/such/directory"))
        with pytest.raises(SandboxError, match="/no/such/directory"):
            await broken.start()
        await broken.stop()

    async def test_sessions_do_not_see_each_other(self, provider: SandboxProvider) -> None:
        if not provider.capabilities.isolated:
            pytest.skip("this kind does not isolate")
        sleep = unique_sleep()
        listen = "import socket; s = socket.create_server(('127.0.0.1', 45871)); print('up', flush=True); s.accept()"
        async with started(provider) as one, started(provider) as two:
            await one.exec(f"echo A > /tmp/x; echo A > x; echo A > ~/x; export V=A; {sleep} &", timeout=10)
            job = await one.spawn(f'exec python3 -c "{listen}"')
            assert await soon(lambda: b"up" in job.output()[0])
            assert await text(two, "cat /tmp/x x ~/x 2>/dev/null; echo $V; pgrep -f '^sleep 18'") == ""
            assert (await two.exec("exec 3<>/dev/tcp/127.0.0.1/45871", timeout=10)).exit_code == 1
            assert await text(one, "pgrep -fc '^sleep 18'") == "1"

    async def test_the_host_is_out_of_reach(self, provider: SandboxProvider, tmp_path: Path) -> None:
        if not provider.capabilities.isolated:
            pytest.skip("this kind does not isolate")
        (tmp_path / "secret").write_text("s")
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with started(provider) as box:
                port = server.getsockname()[1]
                assert (await box.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout=10)).exit_code == 1
                for path in (
                    tmp_path,
                    tmp_path / "secret",
                    Path(__file__),
                    Path(sys.prefix, "pyvenv.cfg"),
                    Path.home(),
                ):
                    assert (await box.exec(f"ls -d '{path}'", timeout=10)).exit_code == 2, path
                assert (await box.exec(f"kill -0 {os.getpid()}", timeout=10)).exit_code == 1
                for forbidden in ("/usr/x", "/x", "/etc/x"):
                    with pytest.raises(PermissionError):
                        await box.write(forbidden, b"x")
                # Anyone may watch the pressure of any machine; what is masked is a device there.
                switches = (
                    "find /proc -type f -writable -not -path '/proc/[0-9]*' -not -path '/proc/*self/*' "
                    "-not -path '/proc/pressure/*' -exec test -f {} ';' -print 2>/dev/null"
                )
                assert await text(box, switches) == ""

    async def test_hostile_commands_hurt_their_own_session_only(
        self, provider: SandboxProvider, tmp_path: Path
    ) -> None:
        if not provider.capabilities.isolated:
            pytest.skip("this kind does not isolate")
        async with started(provider) as other, started(provider) as box:
            sleep = unique_sleep()
            # Before anything hostile: it must not be this machine that is hurt where the adapter promises too much.
            assert (await box.exec(f"kill -0 {os.getpid()} || ls -d '{tmp_path}'", timeout=10)).exit_code == 2
            await box.exec("cat > /tmp/keep", timeout=10, stdin=b"kept")
            for command in (
                "kill -9 -1",
                "pkill -9 bash",
                "pkill bash; killall bash; kill 1; kill -9 1; kill -STOP 1; kill -SEGV 1",
                f"{sleep} & pkill -9 bash",
                "rm -rf ~ /run/sbx-state",
                "kill -STOP $$",
            ):
                began = time.monotonic()
                await box.exec(command, timeout=3)
                assert time.monotonic() - began < 5, command
                assert await text(box, "cat /tmp/keep") == "kept", command
            for command in ("yes > /proc/1/fd/1", "yes > /proc/1/fd/0", "cat /dev/zero > /run/sbx/reports"):
                # These may cost the session its sandbox; they must not hang it, nor cost anyone else theirs.
                with contextlib.suppress(SandboxError):
                    await asyncio.wait_for(box.exec(f"timeout 1 bash -c '{command}'", timeout=3), 15)
            assert await text(other, "echo well") == "well"

    async def test_a_fork_bomb_is_bounded(self, provider: SandboxProvider) -> None:
        if "processes" not in provider.capabilities.limits:
            pytest.skip("this kind does not bound processes")
        async with started(provider, limits=Limits(processes=50)) as box:
            await box.exec(":(){ :|:& };:", timeout=3)
            await asyncio.sleep(1)
            assert await text(box, "echo works | cat") == "works"
            if provider.capabilities.isolated:
                assert int(await text(box, "set -- /proc/[0-9]*; echo $#")) <= 60

    # Beginning and end.

    async def test_stop_at_any_time(self, provider: SandboxProvider) -> None:
        never = provider.make(spec())
        await never.stop()
        with pytest.raises(SandboxError):
            await never.start()
        async with started(provider) as box:
            sleep = unique_sleep()
            job = await box.spawn(sleep)
            waiting = asyncio.create_task(box.exec(sleep, timeout=60))
            assert await soon(lambda: len(running(sleep)) == 2)
            began = time.monotonic()
            await asyncio.gather(box.stop(), box.stop())
            assert time.monotonic() - began < STOP_SECONDS
            with pytest.raises(SandboxError):
                await waiting
            assert not running(sleep) and job.exit_code is not None
            await job.kill()
            with pytest.raises(SandboxError):
                await box.exec("true", timeout=5)
        box.cleanup()

    async def test_cleanup_without_the_event_loop(self, provider: SandboxProvider) -> None:
        box = provider.make(spec())
        await box.start()
        sleep = unique_sleep()
        await box.exec(f"{sleep} &", timeout=10)
        box.cleanup()
        assert not running(sleep)
        await box.stop()

    async def test_cancelling_any_await_leaves_it_stoppable(self, provider: SandboxProvider) -> None:
        moments = random.Random(7)
        sleeps = []
        for _ in range(12):
            sleep = unique_sleep()
            sleeps.append(sleep)

            async def use(command: str) -> None:
                async with started(provider) as box:
                    await box.exec("echo", timeout=10)
                    await box.write("f", b"x" * 100_000)
                    await box.read("f", 100_000)
                    await box.spawn(command)
                    await box.exec(f"setsid {command}", timeout=30)

            task = asyncio.create_task(use(sleep))
            await asyncio.sleep(moments.uniform(0, 0.06))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await soon(lambda: not any(running(sleep) for sleep in sleeps))

    async def test_a_cancelled_command_is_killed_and_the_next_one_works(self, box: Sandbox) -> None:
        sleep = unique_sleep()
        task = asyncio.create_task(box.exec(sleep, timeout=60))
        assert await soon(lambda: bool(running(sleep)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await text(box, "echo next") == "next"
        assert await soon(lambda: not running(sleep))

    async def test_twenty_at_once(self, provider: SandboxProvider) -> None:
        async def one(number: int) -> str:
            async with started(provider) as box:
                await box.exec(f"echo {number} > x; export V={number}", timeout=30)
                return await text(box, "cat x; echo $V", 30)

        assert await asyncio.gather(*(one(n) for n in range(20))) == [f"{n}\n{n}" for n in range(20)]
