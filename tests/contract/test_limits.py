"""What `local` and `host` are held to, what a command that reaches a limit comes to, and that no group stays behind."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError, SetupError
from gristmill.sandbox.base import Sandbox
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.cgroup_trees import trees
from gristmill.sandbox.cgroups import Group, WorkerGroups
from gristmill.sandbox.host import HostSandboxes
from gristmill.sandbox.limits import check_limits
from gristmill.sandbox.shell import ShellSandbox
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.types import Limits

NOBODY = 65534
Provider = BubblewrapSandboxes | HostSandboxes
KINDS: dict[str, type[Provider]] = {"local": BubblewrapSandboxes, "host": HostSandboxes}
# Forks as fast as it can, and goes on where it is refused.
FORKS = "python3 -c '\nimport os\nwhile True:\n    try: os.fork()\n    except OSError: pass'"
HOG = "python3 -c 'x = bytearray(1 << 30)'"


@pytest.fixture(params=KINDS)
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    provider = KINDS[request.param](tmp_path)
    yield provider
    provider.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[BubblewrapSandboxes]:
    provider = BubblewrapSandboxes(tmp_path)
    yield provider
    provider.close()


def needs(provider: Provider, name: str) -> None:
    if name not in provider.capabilities.limits:
        pytest.skip(f"this machine cannot hold a sandbox to {name}")


def group_of(box: Sandbox) -> Group:
    assert isinstance(box, ShellSandbox) and box._group is not None
    return box._group


# Memory.


async def test_memory_is_that_of_all_processes_together(provider: Provider) -> None:
    needs(provider, "memory_mb")
    async with started(provider, limits=Limits(memory_mb=96)) as box:
        result = await box.exec(f"{HOG}; echo after", timeout=20)
        assert result.output.endswith(b"after\n") and result.exit_code == 0
        assert result.note == "The memory limit of 96 MiB was reached, and a process was killed."
        many = "for i in 1 2 3 4 5 6; do (x=$(head -c 30M /dev/zero | tr '\\0' a); sleep 1) & done; wait"
        result = await box.exec(many, timeout=20)
        assert re.fullmatch(r"The memory limit of 96 MiB was reached, and .* killed\.", result.note)
        result = await box.exec("x=$(head -c 1G /dev/zero | tr '\\0' a)", timeout=20)
        assert result.exit_code == 137 and "memory limit" in result.note
        result = await box.exec("echo works", timeout=20)
        assert (result.output, result.note) == (b"works\n", "")


async def test_a_command_goes_before_the_supervisor_does(provider: Provider) -> None:
    needs(provider, "memory_mb")
    async with started(provider, limits=Limits(memory_mb=64)) as box:
        assert await text(box, "cat /proc/self/oom_score_adj") == "500"
        await box.exec(f"echo 0 > /proc/self/oom_score_adj; {HOG}", timeout=20)
        assert await text(box, "echo works") == "works"


async def test_all_of_the_memory_for_files_leaves_room_for_commands(local: BubblewrapSandboxes) -> None:
    needs(local, "memory_mb")
    async with started(local, limits=Limits(memory_mb=64, disk_mb=16)) as box:
        fill = "for d in /tmp /run ~ /dev/shm /workspace; do head -c 99M /dev/zero > $d/x || echo full; done"
        assert (await text(box, f"({fill}) 2>/dev/null")).split() == ["full"] * 5
        assert await text(box, "python3 -c 'print(1)' && rm /workspace/x && echo y > /workspace/x && echo works") == (
            "1\nworks"
        )


# Disk.


async def test_a_bounded_workspace(local: BubblewrapSandboxes) -> None:
    async with started(local, limits=Limits(disk_mb=8), cwd="some/where") as box:
        assert await text(box, "pwd; df --output=size -BM . | tail -1 | tr -d ' '") == "/workspace/some/where\n8M"
        result = await box.exec("head -c 20M /dev/zero > x", timeout=20)
        assert result.exit_code == 1 and b"No space left on device" in result.output
        with pytest.raises(OSError) as caught:
            await box.write("y", b"x" * (9 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert await text(box, "rm x y; echo z > z && cat z") == "z"


# Processes.


async def test_a_fork_bomb_in_the_foreground(provider: Provider) -> None:
    needs(provider, "processes")
    async with started(provider, limits=Limits(processes=60)) as box, started(provider) as other:
        sleep = unique_sleep()
        job = await box.spawn(sleep)
        began = time.monotonic()
        bomb = asyncio.create_task(box.exec(FORKS, timeout=2))
        await asyncio.sleep(1)
        assert await text(other, "echo well | cat") == "well"
        result = await bomb
        assert time.monotonic() - began < 10
        assert result.timed_out and "The limit of 60 processes was reached" in result.note
        assert await text(box, "echo works | cat") == "works"
        assert job.exit_code is None and running(sleep)


async def test_a_fork_bomb_that_is_left_behind(provider: Provider) -> None:
    needs(provider, "processes")
    async with started(provider, limits=Limits(processes=60)) as box:
        sleep = unique_sleep()
        job = await box.spawn(sleep)
        left = await box.spawn(FORKS)
        assert await soon(group_of(box).crowded, 20)
        result = await box.exec("echo works | cat", timeout=20)
        assert result.output == b"works\n" and "ended" in result.note
        await left.wait(5)
        assert left.exit_code is not None
        await job.kill()


async def test_stopping_during_a_fork_bomb(provider: Provider) -> None:
    needs(provider, "processes")
    async with started(provider, limits=Limits(processes=200)) as box:
        await box.spawn(FORKS)
        assert await soon(group_of(box).crowded, 20)
        began = time.monotonic()
        await box.stop()
        assert time.monotonic() - began < 6
        assert await soon(lambda: not any(path.exists() for path in group_of(box)._places))


# CPU.


async def test_cpu_time(provider: Provider) -> None:
    needs(provider, "cpus")
    async with started(provider, limits=Limits(cpus=0.2)) as box:
        spin = (
            "from time import *; used, end = process_time(), monotonic() + 1\n"
            "while monotonic() < end: pass\nprint(process_time() - used)"
        )
        assert float(await text(box, f"python3 -c '{spin}'")) < 0.5
        result = await box.exec("while :; do :; done", timeout=0.5)
        # On a busy machine it may not have got even that much.
        slowed = bool(group_of(box)._count("cpu", "cpu.stat", "nr_throttled"))
        assert result.timed_out and result.note == slowed * "The limit of 0.2 CPUs slowed it down."


# Without any wish of the user, and what cannot be.


async def test_what_holds_where_nothing_was_asked_for(provider: Provider) -> None:
    async with started(provider) as box:
        assert isinstance(box, ShellSandbox)
        memory, processes = box.limits.memory_mb, box.limits.processes
        assert 0 < memory <= 4096 and 0 < processes <= 1024 and box.limits.disk_mb == box.limits.cpus == 0
        needs(provider, "memory_mb")
        group = group_of(box)
        said = group._text("memory", "memory.max" if group._unified else "memory.limit_in_bytes")
        assert int(said) == memory << 20
        assert int(group._text("pids", "pids.max")) == processes


def test_a_limit_that_does_not_hold_is_an_error_before_the_run(tmp_path: Path) -> None:
    check_limits(HostSandboxes, SandboxConfig(kind="host"))
    with pytest.raises(SetupError, match=r"--sandbox=host cannot hold to --sandbox_disk on this machine\."):
        check_limits(HostSandboxes, SandboxConfig(kind="host", limits=Limits(disk_mb=8)))
    check_limits(BubblewrapSandboxes, SandboxConfig(limits=Limits(disk_mb=8)))
    with pytest.raises(SetupError, match=r"99999999 MiB.*more than half.*Give at most \d+ with --sandbox_disk"):
        check_limits(BubblewrapSandboxes, SandboxConfig(limits=Limits(disk_mb=99_999_999)))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_without_cgroups_rlimits_do_what_they_can() -> None:
    root = Path(tempfile.mkdtemp())
    os.chown(root, NOBODY, NOBODY)

    async def scenario() -> None:
        provider = BubblewrapSandboxes(root)
        if "memory_mb" in provider.capabilities.limits:
            return  # a machine where anybody may make cgroups
        assert provider.capabilities.limits == {"disk_mb", "processes"}
        try:
            check_limits(BubblewrapSandboxes, SandboxConfig(limits=Limits(memory_mb=100, cpus=1)))
            raise AssertionError("no error")
        except SetupError as error:
            assert "--sandbox_cpus and --sandbox_memory" in str(error) and "systemd-run" in str(error)
        async with started(provider, limits=Limits(memory_mb=100, processes=40)) as box:
            assert await text(box, "ulimit -d; ulimit -u; ulimit -d unlimited 2>&1 | grep -c permitted") == (
                f"{100 << 10}\n40\n1"
            )
            assert "MemoryError" in await text(box, HOG)
            result = await box.exec(FORKS, timeout=2)
            assert result.timed_out and await text(box, "echo works | cat") == "works"
            await box.spawn(FORKS)
            await asyncio.sleep(1)
            result = await box.exec("echo works | cat", timeout=20)
            assert result.output == b"works\n" and "ended" in result.note
        provider.close()
        assert list(root.iterdir()) == []

    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            asyncio.run(scenario())
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(root)


# What is left of groups.


async def test_no_group_stays(provider: Provider) -> None:
    needs(provider, "processes")
    boxes = [provider.make(spec()) for _ in range(3)]
    for box in boxes:
        await box.start()
        await box.exec(f"setsid {unique_sleep()} &", timeout=20)
    stopped, cleaned, closed = ([*group_of(box)._places] for box in boxes)
    await boxes[0].stop()
    assert not any(path.exists() for path in stopped) and all(path.is_dir() for path in (*cleaned, *closed))
    boxes[1].cleanup()
    assert not any(path.exists() for path in cleaned) and all(path.is_dir() for path in closed)
    provider.close()
    assert not any(path.exists() or path.parent.exists() for path in closed)


WORKER = """
import asyncio, sys
from pathlib import Path
from gristmill.plugins import find
from gristmill.testing.boxes import spec

async def main(kind, root, sleep):
    box = find("sandboxes", kind)(Path(root)).make(spec())
    await box.start()
    await box.exec(f"(env -i setsid {sleep} &)", timeout=20)
    print(*box._group._places, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_groups_of_a_killed_worker_go_at_the_next_start(kind: str, tmp_path: Path) -> None:
    if not trees():
        pytest.skip("no cgroups can be made here")
    sleep = unique_sleep()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, kind, str(tmp_path), sleep], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    paths = [Path(line) for line in worker.stdout.readline().decode().split()]
    assert await soon(lambda: bool(running(sleep)))
    other = WorkerGroups()
    other.close()
    assert paths and all(path.is_dir() for path in paths) and running(sleep)  # its owner lives
    worker.kill()
    worker.wait()
    next_one = WorkerGroups()
    # Also what no mark and no namespace would have found: it cleared its environment.
    assert await soon(lambda: not running(sleep))
    assert not any(path.exists() or path.parent.exists() for path in paths)
    next_one.close()


async def test_what_cleared_its_environment_dies_with_a_host_session(tmp_path: Path) -> None:
    provider = HostSandboxes(tmp_path)
    needs(provider, "processes")
    async with started(provider) as box:
        sleep = unique_sleep()
        await box.exec(f"(env -i setsid {sleep} &)", timeout=20)
        assert await soon(lambda: bool(running(sleep)))
    assert not running(sleep)
    provider.close()


# What hostile commands come to in `local`; docs/sandboxes.md has the table.


async def test_hostile_commands(local: BubblewrapSandboxes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-canary-1234567890")
    (tmp_path / "outside").touch()
    sleep = unique_sleep()
    box = local.make(spec())
    await box.start()
    # Reading the environment and keys of whoever started this.
    look = "env; cat /proc/*/environ /proc/*/cmdline ~/.* /etc/* 2>/dev/null; ls -a / ~ /root"
    assert "canary" not in (await box.exec(look, timeout=20)).output.decode(errors="replace")
    # Writing outside.
    touch = f"touch /x /usr/x /etc/x /proc/sys/kernel/x /dev/x {tmp_path}/outside; echo 1 > /proc/sysrq-trigger"
    result = await box.exec(f"{touch}; ls /x /usr/x /etc/x /dev/x {tmp_path} 2>/dev/null | wc -l", timeout=20)
    assert result.output.endswith(b"\n0\n") and (tmp_path / "outside").stat().st_size == 0
    # Ending whoever started this, by number and by name.
    for command in ("kill -9 -1", f"kill -9 {os.getpid()} $PPID 1", "pkill -9 -f pytest; killall -9 python3 bwrap"):
        await box.exec(command, timeout=5)
    assert await text(box, "echo works") == "works"
    # Endless output.
    result = await box.exec("yes", timeout=1)
    assert result.timed_out and result.dropped > 0 and len(result.output) <= 500_000
    # Surviving the session.
    survive = f"trap '' HUP TERM INT; setsid {sleep} & nohup {sleep} & (({sleep} &) &); env -i setsid -f {sleep}"
    await box.exec(survive, timeout=5)
    await box.spawn(f"exec {sleep}")
    assert await soon(lambda: len(running(sleep)) == 5)
    await box.stop()
    assert not running(sleep)
    with pytest.raises(SandboxError):
        await box.exec("true", timeout=5)
