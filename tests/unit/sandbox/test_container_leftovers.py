"""What killed workers leave: it goes by itself where it can, the next start of the run and `clean` remove the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiodocker")

from gristmill.sandbox import docker_leftovers
from gristmill.sandbox.docker import DockerSandboxes
from gristmill.sandbox.docker_engine import Address
from support.containers import container
from support.images import FULL

if TYPE_CHECKING:
    import aiodocker

    from support.engines import Engine

pytest_plugins = ["support.engines"]

WORKER = """
import asyncio, sys
from gristmill.sandbox.base import SandboxSpec
from gristmill.sandbox.docker import DockerSandboxes

async def main():
    provider = DockerSandboxes()
    for number in range(2):
        box = provider.make(SandboxSpec(session_id=str(number), run_id=sys.argv[1], image=sys.argv[2]))
        await box.start()
        await box.exec("setsid sleep 1000 & echo", timeout=10)
    print(provider.owner, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def engine(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    yield docker_engine
    for name in docker_engine.containers():
        docker_leftovers.remove(Address(docker_engine.url), name)


def killed_worker(run: str) -> str:
    """Owner label of a worker that had two containers when it was killed."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER, run, FULL], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    owner = worker.stdout.readline().strip()
    worker.kill()
    worker.wait()
    worker.stdout.close()
    return owner


def made(engine: Engine, name: str, run: str, owner: str | None) -> str:
    """A container that was created and never started."""
    labels = {docker_leftovers.RUN: run} | ({docker_leftovers.OWNER: owner} if owner is not None else {})

    async def create(client: aiodocker.Docker) -> Any:
        await client.containers.create({"Image": FULL, "Entrypoint": ["sleep", "60"], "Labels": labels}, name=name)

    engine.call(create)
    return name


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def with_part(label: str, **parts: str) -> str:
    found = dict(part.partition("=")[::2] for part in label.split())
    return " ".join(f"{name}={value}" for name, value in (found | parts).items())


def test_containers_of_a_killed_worker_go_by_themselves(engine: Engine) -> None:
    killed_worker("killed-1")
    assert soon(lambda: engine.containers("gristmill.run=killed-1") == [], 15)


async def test_the_next_start_removes_what_could_not_go_by_itself(engine: Engine) -> None:
    dead = killed_worker("killed-2")
    left = made(engine, "left", "killed-2", dead)
    others = [
        made(engine, "alive", "killed-2", docker_leftovers.owner()),
        made(engine, "other-run", "killed-3", dead),
        made(engine, "other-user", "killed-2", with_part(dead, uid="4711")),
        made(engine, "other-machine", "killed-2", with_part(dead, machine="0" * 16)),
        made(engine, "other-namespace", "killed-2", with_part(dead, pidns="1")),
        made(engine, "no-owner", "killed-2", None),
        made(engine, "odd-owner", "killed-2", "somebody"),
    ]
    provider = DockerSandboxes()
    async with container(provider, run="killed-2"):
        assert provider._reaping is not None
        assert await provider._reaping == 1
    found = engine.containers()
    assert left not in found and set(others) <= set(found)
    provider.close()
    assert set(others) <= set(engine.containers())


def test_clean_removes_what_is_of_dead_workers_only(engine: Engine) -> None:
    dead = killed_worker("killed-4")
    assert soon(lambda: engine.containers("gristmill.run=killed-4") == [], 15)
    live = made(engine, "alive-4", "killed-4", docker_leftovers.owner())
    made(engine, "left-4", "killed-4", dead)
    made(engine, "left-5", "killed-5", with_part(dead, boot="of-yesterday"))
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", "clean", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert json.loads(done.stdout)["removed"]["containers"] == 2
    assert engine.containers() == [live]
