"""Containers: images and pulls, limits, network, names and labels, what odd commands do to the stream."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aiodocker")

from gristmill.errors import SandboxError
from gristmill.sandbox import docker_images
from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.docker import DockerSandbox, DockerSandboxes
from gristmill.types import Limits
from support.containers import container, text
from support.images import BUSYBOX, FULL, NO_TOOLS, ODD

if TYPE_CHECKING:
    import aiodocker

    from support.engines import Engine

pytest_plugins = ["support.engines"]


@pytest.fixture
def provider(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerSandboxes]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    provider = DockerSandboxes()
    yield provider
    assert docker_engine.containers("gristmill.run=tests") == []
    provider.close()


@pytest.fixture
async def box(provider: DockerSandboxes) -> AsyncIterator[Sandbox]:
    async with container(provider) as sandbox:
        yield sandbox


def name_of(box: Sandbox) -> str:
    assert isinstance(box, DockerSandbox)
    return box.name


# What images say.


async def test_an_image_without_bash_gets_one(provider: DockerSandboxes) -> None:
    async with container(provider, BUSYBOX) as box:
        assert (
            await text(box, "pwd; echo $KEPT $LANG; [[ a == a ]] && a=(1 2) && echo ${a[1]}") == "/workspace\na b C\n2"
        )
        assert await text(box, "bash -c 'echo ${BASH_VERSION:+bash}'; id -u; echo ok > f; cat f") == "bash\n0\nok"
        await box.write("x/y", bytes(range(256)) * 300)
        assert await box.read("x/y", 100_000) == bytes(range(256)) * 300
        job = await box.spawn("read line; echo got $line")
        await job.write(b"it\n")
        assert await job.wait(10) and job.output()[0] == b"got it\n"


async def test_an_ordinary_user_gets_a_workspace_of_its_own(provider: DockerSandboxes, docker_engine: Engine) -> None:
    async with container(provider, ODD) as box:
        assert await text(box, "id -u; pwd; touch here && ls") == "1000\n/workspace\nhere"
        await asyncio.sleep(1.2)
        assert await text(box, "ls /tmp") == "", "the image's health check runs"
    volumes = docker_engine.call(lambda client: client.volumes.list())
    assert not volumes["Volumes"]


async def test_what_an_image_lacks_is_said(provider: DockerSandboxes) -> None:
    with pytest.raises(SandboxError, match="no program cat"):
        async with container(provider, NO_TOOLS):
            pass


async def test_only_programs_of_ours_are_seen_inside(box: Sandbox) -> None:
    lines = (await text(box, "ps ax -o args=")).splitlines()
    assert len(lines) < 6 and all(len(line) < 300 for line in lines)


# Pulls.


async def test_an_image_is_pulled_once_however_many_name_it(provider: DockerSandboxes, docker_engine: Engine) -> None:
    name = await asyncio.to_thread(docker_engine.publish, FULL, "many:1")

    async def use() -> str:
        async with container(provider, name) as box:
            return await text(box, "echo up")

    assert await asyncio.gather(*(use() for _ in range(5))) == ["up"] * 5
    asked = docker_engine.pulls(name)
    assert asked >= 1
    assert await use() == "up" and docker_engine.pulls(name) == asked


async def test_a_failed_pull_says_what_the_engine_says_and_is_not_repeated(
    provider: DockerSandboxes, docker_engine: Engine
) -> None:
    async def use(name: str) -> str:
        with pytest.raises(SandboxError) as caught:
            async with container(provider, name):
                pass
        return str(caught.value)

    name = "127.0.0.1:5000/nowhere/none:7"
    said = await asyncio.gather(*(use(name) for _ in range(4)))
    assert len(set(said)) == 1 and name in said[0] and "manifest unknown" in said[0]
    assert docker_engine.pulls(name) <= 2  # one pull is a HEAD and perhaps a GET


async def test_a_registry_that_does_not_answer_is_tried_three_times(
    provider: DockerSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.sandbox.docker_images.PULL_PAUSE", 0.05)
    began = time.monotonic()
    with pytest.raises(SandboxError, match="connection refused"):
        async with container(provider, "127.0.0.1:5999/x:1"):
            pass
    assert 0.15 <= time.monotonic() - began < 10


async def test_a_login_of_docker_is_used_for_its_registry_only(
    provider: DockerSandboxes, docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = docker_engine.publish(FULL, "private:1")
    name = published.replace(":5000/", ":5001/")
    monkeypatch.setenv("HOME", str(tmp_path))
    for host in ("127.0.0.1:5999", "127.0.0.1:5001"):
        login = base64.b64encode(b"user:secret").decode()
        (tmp_path / ".docker").mkdir(exist_ok=True)
        (tmp_path / ".docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": login}}}))
        workers = DockerSandboxes()
        if host in name:
            async with container(workers, name) as box:
                assert await text(box, "echo up; env | grep -ci secret") == "up\n0"
        else:
            with pytest.raises(SandboxError, match=r"no basic auth|unauthorized"):
                async with container(workers, name):
                    pass
        workers.close()


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("python", ("python", "latest")),
        ("python:3.12", ("python", "3.12")),
        ("host:5000/a/b", ("host:5000/a/b", "latest")),
        ("host:5000/a/b:c", ("host:5000/a/b", "c")),
        ("a/b@sha256:12", ("a/b", "sha256:12")),
        ("a/b:c@sha256:12", ("a/b:c", "sha256:12")),
    ],
)
def test_names_of_images_are_taken_apart(reference: str, parts: tuple[str, str]) -> None:
    assert docker_images._parts(reference)[:2] == parts


@pytest.mark.parametrize("name", ["", "../containers/x", "a b", "UPPER/x:1", "x:1?y", "-x", "docker://"])
async def test_what_cannot_be_an_image(provider: DockerSandboxes, name: str) -> None:
    with pytest.raises(SandboxError, match=r"image|reference"):
        async with container(provider, name):
            pass


# Limits, network, labels.


async def test_limits_are_set_and_memory_ends_a_command_only(provider: DockerSandboxes) -> None:
    limits = Limits(memory_mb=96, cpus=0.5, processes=64)
    async with container(provider, limits=limits) as box:
        v1, v2 = "/sys/fs/cgroup", "/sys/fs/cgroup"
        memory = await text(box, f"cat {v1}/memory/memory.limit_in_bytes {v2}/memory.max 2>/dev/null")
        cpu = await text(box, f"cat {v1}/cpu/cpu.cfs_quota_us {v2}/cpu.max 2>/dev/null")
        pids = await text(box, f"cat {v1}/pids/pids.max {v2}/pids.max 2>/dev/null")
        assert (memory, cpu.split()[0], pids) == (str(96 << 20), "50000", "64")
        await box.exec("echo kept > f", timeout=10)
        result = await box.exec("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}", timeout=30)
        assert result.exit_code == 137 or b"200000000" not in result.output
        assert await text(box, "cat f") == "kept"


async def test_a_limit_that_the_engine_cannot_keep_is_an_error(provider: DockerSandboxes) -> None:
    with pytest.raises(SandboxError, match=r"storage-opt|quota"):
        async with container(provider, limits=Limits(disk_mb=100)):
            pass


async def test_the_network_is_off_unless_asked_for(provider: DockerSandboxes) -> None:
    interfaces = "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' ' | sort"
    async with container(provider) as closed, container(provider, network=True) as open_:
        assert await text(closed, interfaces) == "lo"
        assert "eth0" in (await text(open_, interfaces)).split()


async def test_labels_say_whose_it_is_and_nothing_is_mounted(provider: DockerSandboxes, docker_engine: Engine) -> None:
    async with container(provider) as box, container(provider):
        names = docker_engine.containers("gristmill.run=tests")
        assert len(set(names)) == 2
        found = docker_engine.call(lambda client: client.containers.container(name_of(box)).show())
    labels = found["Config"]["Labels"]
    assert labels["gristmill.session"] == box.spec.session_id
    assert f" pid={os.getpid()} " in f" {labels['gristmill.owner']} "
    assert not found["HostConfig"]["Binds"] and not found["Mounts"]
    assert not found["HostConfig"]["Privileged"]


# The stream.


async def test_noise_of_earlier_commands_is_in_nobodys_output(box: Sandbox) -> None:
    await box.exec("(while :; do echo noise; done) & echo $! > pid", timeout=10)
    for number in range(8):
        assert await text(box, f"echo {number}") == str(number)
    await box.write("f", b"content")
    assert await box.read("f", 100) == b"content"
    assert await text(box, "kill $(cat pid) && echo gone") == "gone"


async def test_our_files_inside_may_be_removed(box: Sandbox) -> None:
    await box.exec("export V=1; cd /tmp; rm -rf /run/gristmill/*", timeout=10)
    assert await text(box, "echo still") == "still"
    await box.exec("export V=2; cd /", timeout=10)
    assert await text(box, "echo $V; pwd") == "2\n/"


async def test_what_looks_like_a_report_hurts_its_own_call_only(box: Sandbox) -> None:
    token = box._running._token  # type: ignore[attr-defined]
    for forged in ("", "d 1 0\\n", "d 99 x\\n", "e no\\n", "k 2 0\\n", "b 1\\n", "m 1 1\\n"):
        await box.exec(f"printf 'a\\0\\1{token}{forged}b'", timeout=5)
        assert await text(box, "echo next") == "next"
    # A mark without its end is not taken for a report for ever.
    result = await box.exec(f"printf '\\0\\1{token}'; head -c 60000 /dev/zero", timeout=10)
    assert result.exit_code == 0
    assert await text(box, "echo next") == "next"


async def test_output_that_holds_pieces_of_a_mark_is_exact(box: Sandbox) -> None:
    token = box._running._token  # type: ignore[attr-defined]
    data = b"\0\1" + token[:5].encode() + b"\0\0\1" + token[:-1].encode() + b"X\0\1\n" + b"\0"
    assert (await box.exec("cat", timeout=10, stdin=data * 50)).output == data * 50
    for _ in range(20):
        assert (await box.exec("rm -f f; cat > f", timeout=10, stdin=data)).exit_code == 0
        assert await box.read("f", 1000) == data


async def test_killing_everything_inside_loses_a_command_not_the_sandbox(box: Sandbox) -> None:
    await box.exec("export V=1; echo kept > f; (while :; do echo noise; done) &", timeout=10)
    assert await text(box, "echo in a later lane") == "in a later lane"
    began = time.monotonic()
    for command in ("kill -9 -1; sleep 60", "kill -9 -1; sleep 60", "kill -9 0"):
        result = await box.exec(command, timeout=20)
        assert result.exit_code == 137 or result.timed_out
        assert await text(box, "echo $V; cat f") == "1\nkept"
    assert time.monotonic() - began < 45


async def test_a_fork_bomb_leaves_room_for_the_next_command(provider: DockerSandboxes) -> None:
    async with container(provider, limits=Limits(processes=48)) as box:
        await box.exec("b() { b | b & }; b; sleep 1", timeout=3)
        result = await box.exec("echo alive; ls /proc | grep -c '^[0-9]'", timeout=20)
        assert result.output.startswith(b"alive\n")
        assert (await box.exec("b() { b | b & wait; }; b", timeout=2)).timed_out
        assert await text(box, "echo alive") == "alive"


async def test_text_and_bytes_of_any_size_arrive(box: Sandbox) -> None:
    random_bytes = random.Random(5)
    for size in (0, 1, 65_535, 65_536, 65_537, 1_048_576, 2_500_000):
        plain = bytes(random_bytes.choices(range(1, 256), k=min(size, 70_000))).ljust(size, b"x")
        for data in (plain, random_bytes.randbytes(size)):
            await box.write("f", data)
            assert await box.read("f", 3_000_000) == data


async def test_a_file_that_cannot_be_written_leaves_the_stream_in_step(box: Sandbox) -> None:
    with pytest.raises(PermissionError):
        await box.write("/usr/x", b"x" * 3_000_000)
    with pytest.raises(PermissionError):
        await box.write("/usr/x/y/z", b"some text")
    await box.exec("mkdir full", timeout=10)
    with pytest.raises(OSError):
        await box.write("/dev/full/x", b"x")
    assert await text(box, "echo next") == "next"


# Beginning and end.


async def test_giving_up_at_any_moment_leaves_nothing(provider: DockerSandboxes, docker_engine: Engine) -> None:
    moments = random.Random(11)

    async def use(seconds: float) -> None:
        async def live() -> None:
            async with container(provider) as box:
                await box.exec("sleep 30 & echo", timeout=10)
                await box.spawn("sleep 30")
                await asyncio.gather(*(box.exec("sleep 30", timeout=60, stateful=False) for _ in range(2)))

        task = asyncio.create_task(live())
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await asyncio.gather(*(use(moments.uniform(0, 1.5)) for _ in range(16)))
    assert docker_engine.containers("gristmill.run=tests") == []


async def test_a_container_that_is_killed_from_outside_is_one_clear_error(
    docker_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    provider = DockerSandboxes()
    box = provider.make(SandboxSpec(session_id="s", run_id="tests", image=FULL))
    await box.start()
    waiting = asyncio.create_task(box.exec("sleep 30", timeout=60))
    await asyncio.sleep(0.1)
    docker_engine.call(lambda client: client.containers.container(name_of(box)).kill())
    with pytest.raises(SandboxError, match="ended"):
        await waiting
    with pytest.raises(SandboxError, match="ended"):
        await box.exec("true", timeout=5)
    await box.stop()
    provider.close()
    assert docker_engine.containers("gristmill.run=tests") == []


async def test_no_engine_is_said_with_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert f"{tmp_path}/none.sock" in DockerSandboxes.problem() and "DOCKER_HOST" in DockerSandboxes.problem()
    monkeypatch.setenv("DOCKER_HOST", "ssh://somewhere")
    assert "unix:///path" in DockerSandboxes.problem()
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr("gristmill.config.os.environ", {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})
    said = DockerSandboxes.problem()
    if said:  # else this machine runs an engine
        assert "/var/run/docker.sock" in said and f"{tmp_path}/podman/podman.sock" in said and "systemctl" in said


async def test_what_is_no_engine_is_told_from_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"message": "who are you?"}).encode()
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    async with server:
        problem = await asyncio.to_thread(DockerSandboxes.problem, {"DOCKER_HOST": f"unix://{tmp_path}/s"})
    assert "403" in problem and "who are you?" in problem


async def test_tcp_reaches_an_engine_too(docker_engine: Engine) -> None:
    path = docker_engine.url.removeprefix("unix://")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(path)
        await asyncio.gather(pipe(reader, back), pipe(there, writer), return_exceptions=True)
        back.close()
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        provider = DockerSandboxes(options={"DOCKER_HOST": f"tcp://127.0.0.1:{port}"})
        async with container(provider) as box:
            assert await text(box, "echo over tcp") == "over tcp"
            job = await box.spawn("cat")
            await job.write(b"x")
            await job.close_stdin()
            assert await job.wait(10) and job.output()[0] == b"x"
        await asyncio.to_thread(provider.close)


async def test_an_image_that_was_removed_meanwhile_is_pulled_again(
    provider: DockerSandboxes, docker_engine: Engine
) -> None:
    name = docker_engine.publish(FULL, "again:1")
    async with container(provider, name):
        pass
    asked = docker_engine.pulls(name)

    async def remove(client: aiodocker.Docker) -> None:
        await client.images.delete(name)

    docker_engine.call(remove)
    async with container(provider, name):  # its content is still there, under another name
        pass
    image = provider.engine.images._found[name]  # type: ignore[union-attr]
    image[1].result().__dict__["id"] = "sha256:" + "0" * 64  # as if the content had gone too
    with pytest.raises(SandboxError, match="No such image"):
        async with container(provider, name):
            pass
    async with container(provider, name) as box:
        assert await text(box, "echo up") == "up"
    assert docker_engine.pulls(name) > asked
