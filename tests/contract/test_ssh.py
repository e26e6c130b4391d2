"""Sandboxes on a remote host against the conformance suite, with a real SSH server on loopback, and what is special."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.config import sandbox_from_environment
from gristmill.errors import SandboxError
from gristmill.sandbox.base import STOP_SECONDS
from gristmill.sandbox.ssh import SshSandboxes, reap
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from gristmill.testing.sandbox_suite import SandboxSuite
from support.runs import Place

if TYPE_CHECKING:
    from support.sshd import Server

pytest_plugins = ["support.sshd"]


@pytest.fixture
def provider(sshd: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshSandboxes]:
    monkeypatch.setenv("HOME", str(sshd.home))
    provider = SshSandboxes(options=sshd.options)
    yield provider
    assert [path.name for path in sshd.temp.glob("*/s-*")] == []
    provider.close()
    provider.close()
    gone(sshd)


def gone(sshd: Server) -> None:
    """Wait until nothing is left of connections that were cut."""
    end = time.monotonic() + 10
    while sshd.left() or sshd.sessions():
        assert time.monotonic() < end, (sshd.left(), sshd.sessions())
        time.sleep(0.01)


class TestSsh(SandboxSuite):
    @pytest.fixture
    def provider(self, provider: SshSandboxes) -> SshSandboxes:
        return provider


# Who is at the other end, and who we are.


async def test_a_host_that_is_not_known_is_refused_with_the_mend(sshd: Server, provider: SshSandboxes) -> None:
    assert SshSandboxes.problem(sshd.options) == ""
    for learn in (lambda: sshd.learn("other"), lambda: sshd.known_hosts.write_text(""), sshd.known_hosts.unlink):
        learn()
        try:
            problem = SshSandboxes.problem(sshd.options)
            assert f"ssh-keyscan -p {sshd.port} 127.0.0.1 >> ~/.ssh/known_hosts" in problem
            box = provider.make(spec())
            with pytest.raises(SandboxError, match="right host"):
                await box.start()
            await box.stop()
        finally:
            sshd.learn("host")
    (sshd.home / ".ssh" / "config").write_text("StrictHostKeyChecking no\nUserKnownHostsFile none\n")
    try:
        sshd.learn("other")
        assert "right host" in SshSandboxes.problem(sshd.options)
    finally:
        sshd.learn("host")
        (sshd.home / ".ssh" / "config").unlink()


def test_a_login_that_is_refused_names_the_mend(sshd: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(sshd.home))
    assert "TERMINAL_SSH_KEY" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_KEY": str(sshd.root / "other")})
    assert "nobody-here@127.0.0.1 refuses" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_USER": "nobody-here"})
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    assert "ssh-agent" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_KEY": str(locked)})
    (tmp_path / "nonsense").write_text("no key")
    assert "cannot be used" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_KEY": str(tmp_path / "nonsense")})


def test_settings_that_say_too_little_or_nonsense(sshd: Server, tmp_path: Path) -> None:
    assert "TERMINAL_SSH_HOST" in SshSandboxes.problem()
    for port in ("ssh", "-1", "65536", "22.0"):
        assert "TERMINAL_SSH_PORT" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_PORT": port})
    assert "does not exist" in SshSandboxes.problem({**sshd.options, "TERMINAL_SSH_KEY": str(tmp_path / "none")})


def test_what_the_variables_give() -> None:
    ssh = {"TERMINAL_SSH_HOST": "h", "TERMINAL_SSH_USER": "u", "TERMINAL_SSH_PORT": "23", "TERMINAL_SSH_KEY": "~/k"}
    found = sandbox_from_environment({"TERMINAL_ENV": "ssh", "TERMINAL_DOCKER_IMAGE": "debian", **ssh})
    assert (found.kind, found.image, found.options) == ("ssh", "", ssh)
    for kind in ("singularity", "modal", "daytona"):
        variable = f"TERMINAL_{kind.upper()}_IMAGE"
        assert sandbox_from_environment({variable: "mine", "TERMINAL_DOCKER_IMAGE": "no"}, kind=kind).image == "mine"
    assert sandbox_from_environment({"TERMINAL_DOCKER_IMAGE": "debian"}, kind="docker").image == "debian"


async def test_a_key_of_the_agent_is_enough(sshd: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(sshd.home))
    options = {name: value for name, value in sshd.options.items() if name != "TERMINAL_SSH_KEY"}
    assert "refuses the login" in SshSandboxes.problem(options)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        assert await soon((tmp_path / "agent").exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", str(sshd.key)], check=True)
        assert SshSandboxes.problem(options) == ""
    finally:
        agent.kill()
        agent.wait()


async def test_nothing_of_this_machine_goes_along(
    sshd: Server, provider: SshSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sshd.home / ".ssh" / "config").write_text("ForwardAgent yes\nSendEnv *\nSetEnv OTHER=sk-canary\n")
    monkeypatch.setenv("LC_CANARY", "sk-canary-1234567890")
    try:
        async with started(provider):
            serving = sshd.sessions()
            served = [pid for pid in processes() if below(pid, serving)]
            seen = [Path(f"/proc/{pid}/environ").read_bytes() for pid in served]
            assert any(b"gristmill-ssh-" in one for one in seen)  # its keeper is among them
            assert not any(b"canary" in one or b"SSH_AUTH_SOCK" in one for one in seen)
    finally:
        (sshd.home / ".ssh" / "config").unlink()


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def below(pid: int, parents: list[int]) -> bool:
    """Whether a process is a child of one of these, or of such a one."""
    while pid > 1 and pid not in parents:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid in parents


# Directories and connections.


async def test_directories_are_private_and_short(sshd: Server, provider: SshSandboxes) -> None:
    async with started(provider) as box:
        path = Path(await text(box, "pwd"))
        while path != sshd.temp:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
            path = path.parent
        assert await text(box, "touch f; stat -c %a f; echo $HOME $TMPDIR") == (
            f"644\n{Path(box.workspace).parent}/home {Path(box.workspace).parent}/tmp"
        )
        assert len(box.workspace) - len(str(sshd.temp)) < 45  # the path of a Unix socket has 108 bytes


async def test_a_tree_that_resists_is_removed(sshd: Server, provider: SshSandboxes) -> None:
    async with started(provider) as box:
        await box.exec("mkdir -p a/b/c; touch a/b/c/f; chmod 0 a/b/c a/b a; mkdir -- '-x y'", timeout=10)
    assert list(sshd.temp.glob("*/s-*")) == []


async def test_one_connection_as_long_as_the_host_takes_it(sshd: Server, provider: SshSandboxes) -> None:
    async with started(provider) as one, started(provider) as two:
        assert await text(one, "echo 1") + await text(two, "echo 2") == "12"
        assert len(sshd.sessions()) == 1
        # Each job has a stream; the server takes 10 over a connection.
        jobs = [await one.spawn("read x; echo $x") for _ in range(10)]
        assert 2 <= len(sshd.sessions()) <= 3
        for job in jobs:
            await job.write(b"got\n")
            assert await job.wait(10) and job.output()[0] == b"got\n"


async def test_a_spec_that_cannot_be_served(provider: SshSandboxes) -> None:
    with pytest.raises(SandboxError, match="docker"):
        provider.make(spec(image="debian:12"))
    for broken in (spec(env={"A-B": "x"}), spec(env={"A": "a\0b"})):
        box = provider.make(broken)
        with pytest.raises(SandboxError, match="variable"):
            await box.start()
        await box.stop()


async def test_closing_the_provider_ends_what_runs(sshd: Server, provider: SshSandboxes) -> None:
    boxes = [provider.make(spec()) for _ in range(3)]
    sleep = unique_sleep()
    for box in boxes:
        await box.start()
        await box.exec(f"setsid {sleep} &", timeout=20)
    provider.close()
    assert not running(sleep) and list(sshd.temp.glob("*/s-*")) == []
    for box in boxes:
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)
        await box.stop()


# Losses.


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server for one test, which may break it."""
    from support.sshd import PROGRAM, Server

    if not PROGRAM:
        pytest.skip("sshd is not installed (Debian: openssh-server)")
    server = Server(tmp_path, more="MaxSessions 2\n")
    monkeypatch.setenv("HOME", str(server.home))
    server.start()
    yield server
    server.stop()


async def test_a_lost_connection_costs_its_sessions_and_nothing_stays(fragile: Server) -> None:
    provider = SshSandboxes(options=fragile.options)
    sleep = unique_sleep()
    # The server takes two programs over a connection: the keeper and one sandbox.
    async with started(provider) as other:
        box = provider.make(spec())
        before = set(fragile.sessions())
        await box.start()
        await box.exec(f"setsid {sleep} & disown", timeout=20)
        job = await box.spawn(sleep)
        waiting = asyncio.create_task(box.exec(sleep, timeout=60))
        assert await soon(lambda: len(running(sleep)) == 3)
        for pid in set(fragile.sessions()) - before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await waiting
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)
        assert await job.wait(5) and job.exit_code == 137
        began = time.monotonic()
        await box.stop()
        assert time.monotonic() - began < STOP_SECONDS and not running(sleep)
        assert await text(other, "echo well") == "well"
        async with started(provider) as another:
            assert await text(another, "echo well") == "well"
    provider.close()
    gone(fragile)


async def test_a_session_whose_first_program_was_killed_ends_at_once(sshd: Server, provider: SshSandboxes) -> None:
    async with started(provider) as box:
        sleep = unique_sleep()
        await box.exec(
            f"{sleep} &", timeout=10
        )  # holds the output of the first program, which is therefore not at its end
        mark = f"SBX_CALL={Path(box.workspace).parts[-3]}.s-1.lane".encode()
        for pid in processes():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(SandboxError):
            await box.exec("sleep 5", timeout=20)
            await box.exec("true", timeout=5)
        assert time.monotonic() - began < 4
    assert not running(sleep)


async def test_a_host_that_is_gone_is_an_error_in_time_and_one_that_comes_back_works(fragile: Server) -> None:
    provider = SshSandboxes(options=fragile.options)
    box = provider.make(spec())
    await box.start()
    fragile.stop()
    with pytest.raises(SandboxError):
        await box.exec("true", timeout=5)
    began = time.monotonic()
    with pytest.raises(SandboxError):
        await box.stop()  # that nothing is left cannot be known
    other = provider.make(spec())
    with pytest.raises(SandboxError, match="cannot be reached"):
        await other.start()
    assert time.monotonic() - began < STOP_SECONDS
    fragile.start()
    async with started(provider) as again:
        assert await text(again, "echo well") == "well"
    assert await soon(lambda: len(fragile.left()) == 1)  # what watched over the lost connection has tidied up
    provider.close()
    gone(fragile)


async def test_a_server_that_takes_one_program_only_is_refused(tmp_path: Path, fragile: Server) -> None:
    config = tmp_path / "config"
    config.write_text(config.read_text().replace("MaxSessions 2", "MaxSessions 1"))
    fragile.stop()
    fragile.start()
    provider = SshSandboxes(options=fragile.options)
    box = provider.make(spec())
    with pytest.raises(SandboxError, match="MaxSessions"):
        await box.start()
    await box.stop()
    provider.close()
    gone(fragile)


WORKER = """
import asyncio, json, sys
from gristmill.plugins import find
from gristmill.sandbox.base import SandboxSpec

async def main(options, run, sleep):
    provider = find("sandboxes", "ssh")(options=json.loads(options))
    box = provider.make(SandboxSpec(session_id="s", run_id=run))
    await box.start()
    await box.exec(f"{sleep} & setsid {sleep} & (({sleep} &) &)", timeout=20)
    await box.spawn(sleep)
    print(box.place.partition("/")[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def worker(sshd: Server, run: str, sleep: str) -> tuple[subprocess.Popen[bytes], str]:
    """A worker with a sandbox, and the name of its directory."""
    import json

    argv = [sys.executable, "-c", WORKER, json.dumps(sshd.options), run, sleep]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def keepers(name: str) -> list[int]:
    """Processes that watch over a directory."""
    mark = f"SBX_CALL={name}.keeper".encode()
    found = []
    for pid in processes():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


async def test_nothing_is_left_of_a_killed_worker(sshd: Server, provider: SshSandboxes) -> None:
    sleep = unique_sleep()
    process, name = worker(sshd, "suite", sleep)
    assert await soon(lambda: len(running(sleep)) == 4) and sshd.left() == [name]
    async with started(provider) as box:  # of the same run, while the worker lives
        assert await text(box, "echo well") == "well"
        assert len(running(sleep)) == 4
    process.kill()
    process.wait()
    assert await soon(lambda: not running(sleep) and name not in sshd.left())


async def test_what_even_the_keeper_could_not_remove(sshd: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(sshd.home))
    for variable, value in sshd.options.items():
        monkeypatch.setenv(variable, value)
    sleeps = {run: unique_sleep() for run in ("this", "other")}
    workers = [worker(sshd, run, sleep) for run, sleep in sleeps.items()]
    assert reap() == 0  # they live
    for process, name in workers:
        for pid in keepers(name):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    foreign = sshd.temp / "gristmill-ssh-foreign"
    foreign.mkdir()
    (foreign / "label").write_text("this-too 0123456789ab.01234567.1.1.1\n")
    assert await soon(lambda: all(len(running(sleep)) == 4 for sleep in sleeps.values()))
    provider = SshSandboxes(options=sshd.options)
    box = provider.make(spec())
    box.spec = type(box.spec)(session_id="s", run_id="this")
    await box.start()
    assert await soon(lambda: not running(sleeps["this"]))
    assert len(running(sleeps["other"])) == 4
    await box.stop()
    provider.close()
    assert await soon(lambda: len(sshd.left()) == 2)  # its own has gone
    assert reap() == 1
    assert not running(sleeps["other"])
    assert await soon(lambda: sshd.left() == [foreign.name])  # another machine's, whatever became of it
    (foreign / "label").unlink()
    foreign.rmdir()


# A whole run.


def test_a_run_on_a_remote_host(sshd: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(sshd.home))
    monkeypatch.setenv("TERMINAL_ENV", "ssh")
    for variable, value in sshd.options.items():
        monkeypatch.setenv(variable, value)
    place = Place(tmp_path)
    place.dataset({"prompt": "one", "cwd": "sub"}, {"prompt": "two", "files": {"given": "text"}})
    script = [call("terminal", {"command": "pwd; cat given; env"}, reasoning="why"), say("done", reasoning="so")]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, "--num_workers=1")
    assert "--sandbox=ssh isolates nothing" in printed
    rows = {row["conversations"][1]["value"]: row["conversations"][3]["value"] for row in place.merged()}
    assert "/workspace/sub\\n" in rows["one"] and "/workspace\\ntext" in rows["two"]
    assert "canary" not in str(rows)
    gone(sshd)
