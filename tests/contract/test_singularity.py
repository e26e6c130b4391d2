"""Instances of Apptainer against the conformance suite. Not exercised live: its command line is a stand-in here."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gristmill.config import singularity_environment
from gristmill.errors import SandboxError
from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.singularity import SingularitySandboxes
from gristmill.sandbox.singularity_program import reap
from gristmill.testing.boxes import running, soon, spec, started, text, unique_sleep
from gristmill.testing.sandbox_suite import SandboxSuite
from gristmill.types import Limits
from support import apptainer


class Imaged(SingularitySandboxes):
    """Takes an image where the spec names none."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        return super().make(msgspec.structs.replace(spec, image=spec.image or "full:1"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program is in PATH and keeps its files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    apptainer.install(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def nothing_left(provider: SingularitySandboxes, home: Path) -> None:
    assert [path.name for path in home.glob("gristmill-*/s-*")] == []
    provider.close()
    provider.close()
    assert list(home.glob("gristmill-*")) == []
    assert list(home.glob(".apptainer/instances/*/*/*/*")) == []


class TestSingularity(SandboxSuite):
    @pytest.fixture
    def provider(self, home: Path) -> Iterator[SingularitySandboxes]:
        provider = Imaged(home)
        yield provider
        nothing_left(provider, home)


@pytest.fixture
def provider(home: Path) -> Iterator[SingularitySandboxes]:
    provider = SingularitySandboxes(home)
    yield provider
    nothing_left(provider, home)


def calls(home: Path, verb: str) -> list[str]:
    return [
        line for line in (home / "calls").read_text().splitlines() if line.removeprefix("--silent ").startswith(verb)
    ]


# Images.


async def test_an_image_is_pulled_once_per_host(home: Path, provider: SingularitySandboxes) -> None:
    async def one(provider: SingularitySandboxes) -> str:
        async with started(provider, image="full:1") as box:
            return await text(box, "echo well")

    second = SingularitySandboxes(home)
    assert await asyncio.gather(one(provider), one(provider), one(second), one(second)) == ["well"] * 4
    assert len(calls(home, "pull")) == 1
    third = SingularitySandboxes(home)
    async with started(third, image="docker://full:1") as box:
        assert await text(box, "echo well") == "well"
    assert len(calls(home, "pull")) == 1
    second.close()
    third.close()


async def test_an_image_that_cannot_be_had_fails_its_sessions_only(home: Path, provider: SingularitySandboxes) -> None:
    for image, words in (
        ("missing:1", "manifest unknown"),
        ("missing:1", "manifest unknown"),
        ("broken:1", "can't open squashfs"),
        ("", "TERMINAL_SINGULARITY_IMAGE"),
        ("full:1; touch x", "cannot be the name"),
        ("-v:1", "cannot be had"),
        ("/no/such.sif", "does not exist"),
    ):
        box = provider.make(spec(image=image))
        with pytest.raises(SandboxError, match=words):
            await box.start()
        await box.stop()
    assert len([line for line in calls(home, "pull") if "missing" in line]) == 1
    assert not list(home.glob(".cache/gristmill/images/*.part"))
    async with started(provider, image="full:1") as box:
        assert await text(box, "echo well") == "well"


async def test_a_pull_that_was_killed_is_done_again(home: Path, provider: SingularitySandboxes) -> None:
    async with started(provider, image="full:1"):
        pass
    (image,) = home.glob(".cache/gristmill/images/*.sif")
    image.unlink()
    image.with_suffix(".part").write_text("half an image")
    other = SingularitySandboxes(home)
    async with started(other, image="full:1") as box:
        assert await text(box, "echo well") == "well"
    other.close()


async def test_an_image_of_ones_own_is_taken_as_it_is(home: Path, provider: SingularitySandboxes) -> None:
    (home / "mine.sif").write_text("full")
    async with started(provider, image="~/mine.sif") as box:
        assert await text(box, "echo well") == "well"
    assert not calls(home, "pull")


async def test_an_image_without_bash(provider: SingularitySandboxes) -> None:
    for _ in range(2):
        async with started(provider, image="no-bash:1") as box:
            assert await text(box, "echo $BASH_VERSION | wc -l; export V=1") == "1"
            assert await text(box, "echo $V") == "1"


# What it is asked for.


async def test_network_only_when_asked_for(provider: SingularitySandboxes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        for network, code in ((False, 1), (True, 0)):
            async with started(provider, image="full:1", network=network) as box:
                assert (await box.exec(reach, timeout=10)).exit_code == code


async def test_limits_are_handed_on(home: Path, provider: SingularitySandboxes) -> None:
    async with started(provider, image="full:1", limits=Limits(memory_mb=512, cpus=1.5)):
        (call,) = calls(home, "instance start")
        assert "--memory 536870912 --memory-swap 536870912 --cpus 1.5 " in call
    async with started(provider, image="full:1"):
        assert "--memory" not in calls(home, "instance start")[1] and "--cpus" not in calls(home, "instance start")[1]


async def test_the_programs_own_variables_stay_outside(provider: SingularitySandboxes) -> None:
    async with started(provider, image="full:1", env={"GIVEN": "1"}) as box:
        seen = await text(box, "env")
        assert "GIVEN=1" in seen and "HOME=/home/agent" in seen and "LANG=C.UTF-8" in seen
        assert "APPTAINER" not in seen and "SINGULARITY" not in seen
    given = {"APPTAINER_BIND": "/", "SINGULARITYENV_X": "1", "OPENAI_API_KEY": "sk", "APPTAINER_CACHEDIR": "/c"}
    assert singularity_environment({**given, "HOME": "/h"}) == {"APPTAINER_CACHEDIR": "/c", "HOME": "/h"}


async def test_a_spec_that_cannot_be_served(provider: SingularitySandboxes) -> None:
    box = provider.make(spec(image="full:1", env={"A-B": "x"}))
    with pytest.raises(SandboxError, match="variable"):
        await box.start()
    await box.stop()


# Losses.


async def test_the_state_outlives_the_first_program(provider: SingularitySandboxes) -> None:
    async with started(provider, image="full:1") as box:
        await box.exec("export V=1; mkdir d; cd d; trap '' HUP; setsid sleep 1000 & disown", timeout=10)
        job = await box.spawn("read x; echo got $x")
        for _ in range(2):
            await box.exec("kill -9 $(pgrep -o bash | head -n 1) $(pgrep bash)", timeout=10)
            assert await text(box, "echo $V; pwd; pgrep -c sleep") == "1\n/workspace/d\n2"
        assert await job.wait(5) and job.exit_code == 137
        began = time.monotonic()
        result = await box.exec("sleep 30", timeout=0.3)
        assert result.timed_out and time.monotonic() - began < 6
        # A killed process may be seen for a moment longer.
        assert (
            await text(box, "for i in $(seq 50); do n=$(pgrep -c sleep); [ $n = 2 ] && break; sleep 0.1; done; echo $n")
            == "2"
        )


async def test_an_instance_that_ends_is_an_error(home: Path, provider: SingularitySandboxes) -> None:
    async with started(provider, image="full:1") as box:
        (name,) = [path.name for path in home.glob(".apptainer/instances/app/*/*/*")]
        argv = [home / "bin" / "apptainer", "instance", "stop", "--force", "--timeout", "5", name]
        subprocess.run(argv, check=True, env=singularity_environment())
        with pytest.raises(SandboxError):
            await box.exec("true", timeout=5)
            await box.exec("true", timeout=5)


WORKER = """
import asyncio, sys
from pathlib import Path
from gristmill.plugins import find
from gristmill.testing.boxes import spec

async def main(root, sleep):
    provider = find("sandboxes", "singularity")(Path(root), options={})
    box = provider.make(spec(image="full:1"))
    await box.start()
    await box.exec(f"{sleep} & setsid {sleep} & (({sleep} &) &)", timeout=20)
    await box.spawn(sleep)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_nothing_is_left_of_a_killed_worker(home: Path) -> None:
    sleep = unique_sleep()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(home), sleep], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    assert await soon(lambda: len(running(sleep)) == 4)
    assert reap() == 0  # its owner lives
    other = SingularitySandboxes(home)
    other.close()
    assert len(running(sleep)) == 4
    worker.kill()
    worker.wait()
    assert await soon(lambda: not running(sleep))  # its first program has seen its stream end
    assert len(list(home.glob(".apptainer/instances/app/*/*/*"))) == 1
    nothing_left(SingularitySandboxes(home), home)


async def test_closing_the_provider_ends_what_runs(home: Path, provider: SingularitySandboxes) -> None:
    sleep = unique_sleep()
    box = provider.make(spec(image="full:1"))
    await box.start()
    await box.exec(f"setsid {sleep} &", timeout=20)
    provider.close()
    assert not running(sleep)
    with pytest.raises(SandboxError):
        await box.exec("true", timeout=5)
    await box.stop()


def test_problem_says_what_is_missing(home: Path) -> None:
    assert SingularitySandboxes.problem() == ""
    program = home / "bin" / "apptainer"
    program.write_text("#!/bin/sh\necho 'FATAL:   could not open the configuration' >&2; exit 1\n")
    assert "could not open the configuration" in SingularitySandboxes.problem()
    shutil.move(program, home / "bin" / "singularity")
    assert "could not open the configuration" in SingularitySandboxes.problem()
    (home / "bin" / "singularity").unlink()
    assert "apptainer.org" in SingularitySandboxes.problem()
    with pytest.raises(SandboxError):
        SingularitySandboxes(home)
