"""Bug cases of containers, through whole runs where they are about runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiodocker")

from gristmill.sandbox.docker import DockerSandboxes
from gristmill.testing.endpoint import ScriptedEndpoint, call, calls, say
from support.containers import container, text
from support.images import BUSYBOX, FULL, NO_START
from support.runs import Place

if TYPE_CHECKING:
    import aiodocker

    from support.engines import Engine

pytest_plugins = ["support.engines"]

DOCKER = "--sandbox=docker"
MISSING = "127.0.0.1:5000/nowhere/none:1"


@pytest.fixture
def engine(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    monkeypatch.setenv("TERMINAL_DOCKER_IMAGE", FULL)
    yield docker_engine
    assert docker_engine.containers("gristmill.owner") == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def in_flight(place: Place, url: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is going on; in the end it is not any more."""
    process = place.start(url, *flags)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def results(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tools of a row's session gave."""
    found = []
    for turn in row["conversations"]:
        if turn["from"] == "tool":
            for piece in turn["value"].split("<tool_response>")[1:]:
                content = json.loads(piece.partition("</tool_response>")[0])["content"]
                found.append(json.loads(content) if isinstance(content, str) else content)
    return found


def created(engine: Engine, since: float) -> int:
    """How many containers were made since then, by what the engine tells."""

    async def work(client: aiodocker.Docker) -> int:
        filters = json.dumps({"type": ["container"], "event": ["create"]})
        query = {"since": f"{since:.9f}", "until": f"{time.time():.9f}", "filters": filters}
        async with client._query("events", params=query) as answer:
            return len((await answer.text()).splitlines())

    return int(engine.call(work))


async def test_sb_01_timed_out_command_keeps_running_in_the_container(engine: Engine) -> None:
    """SB-01: after a timeout the process tree is gone, the container and its files are there."""
    provider = DockerSandboxes()
    async with container(provider) as box:
        await box.exec("echo kept > file", timeout=10)
        for command in ("sleep 600", "bash -c 'trap \"\" TERM; while :; do :; done'"):
            result = await box.exec(command, timeout=1)
            assert (result.timed_out, result.exit_code) == (True, 124)
        assert await text(box, "ps ax | grep -c '[s]leep 600'") == "0"
        assert await text(box, "ps ax -o stat= | grep -c R; cat file") == "1\nkept"  # ps alone runs
    provider.close()


def test_sb_02_container_created_but_not_started(engine: Engine, place: Place) -> None:
    """SB-02: nothing is left of it; the rows are failures of the infrastructure, asked nobody, and are owed."""
    place.dataset({"prompt": "a", "image": NO_START}, {"prompt": "b", "image": NO_START})
    with ScriptedEndpoint([say("done", reasoning="r")]).in_thread() as endpoint:
        place.run(endpoint.url, DOCKER, status=3)
        assert engine.containers() == [] and endpoint.count == 0
        lines = place.lines()
        assert [(line["failed"], line["outcome"]) for line in lines] == [(True, "sandbox_error")] * 2
        assert all("nobody-here" in line["error"]["message"] for line in lines)
        place.dataset({"prompt": "a", "image": NO_START}, {"prompt": "b", "image": NO_START})
        place.run(endpoint.url, DOCKER, "--resume", status=3)
    assert [line["attempt"] for line in place.lines()] == [1, 1, 2, 2]


async def test_sb_03_containers_outlive_a_killed_run(engine: Engine, place: Place) -> None:
    """SB-03: killed with four commands running, all its containers are gone within 15 s; another run's live on."""
    place.dataset(*(f"task {n}" for n in range(4)))
    provider = DockerSandboxes()
    script = [call("terminal", {"command": "setsid sleep 500"}, reasoning="r"), say("done", reasoning="r")]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        async with container(provider, run="another") as other:
            with in_flight(place, endpoint.url, DOCKER, "--num_workers=4", "--concurrency=4"):
                assert soon(lambda: len(engine.containers("gristmill.owner")) == 5, 60)
                label = f"gristmill.run={json.loads((place.directory / 'run.json').read_text())['run_id']}"
                assert len(engine.containers(label)) == 4
            began = time.monotonic()  # it was killed
            assert soon(lambda: engine.containers(label) == [], 15), engine.containers(label)
            print(f"gone after {time.monotonic() - began:.1f} s")
            assert len(engine.containers("gristmill.run=another")) == 1
            assert await text(other, "echo alive") == "alive"
    with ScriptedEndpoint([say("done", reasoning="r")]).in_thread() as endpoint:
        place.run(endpoint.url, DOCKER, "--resume")
    assert len(place.merged()) == 4
    provider.close()


def test_sb_04_fixed_container_name_collides_with_a_stale_one(engine: Engine, place: Place) -> None:
    """SB-04: names are unique, whatever stands there from before."""

    async def make(client: aiodocker.Docker) -> None:
        for name in ("gristmill-0-0-1", "gristmill"):
            await client.containers.create({"Image": FULL, "Cmd": ["true"]}, name=name)

    async def remove(client: aiodocker.Docker) -> None:
        for name in ("gristmill-0-0-1", "gristmill"):
            await client.containers.container(name).delete(force=True)

    engine.call(make)
    try:
        place.dataset("a")
        script = [call("terminal", {"command": "echo up"}, reasoning="r"), say("done", reasoning="r")]
        with ScriptedEndpoint(script).in_thread() as endpoint:
            for run in ("one", "two"):  # the same prompt, attempt and sample
                place.run(endpoint.url, DOCKER, f"--run_name={run}")
        assert engine.containers() == ["gristmill", "gristmill-0-0-1"]
    finally:
        engine.call(remove)


def test_sb_05_two_rows_share_one_sandbox(engine: Engine, place: Place) -> None:
    """SB-05: no row sees another's files or processes, beside it or after it in the same worker."""
    place.dataset("write A", "read it", {"prompt": "read it too", "cwd": "/tmp"}, "read it once more")
    look = "cat /tmp/x; ps ax | grep -c '[s]leep 700'; echo \"[$V]\""
    script = {
        "write": [
            call("terminal", {"command": "echo A > /tmp/x; export V=A; sleep 700 & cat /tmp/x"}, reasoning="r"),
            call("terminal", {"command": "sleep 1.5"}, reasoning="r"),
            say("done", reasoning="r"),
        ],
        "": [call("terminal", {"command": look}, reasoning="r"), say("done", reasoning="r")],
    }
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, DOCKER, "--num_workers=1", "--concurrency=2")
    rows = {row["prompt_index"]: results(row) for row in place.merged()}
    assert rows[0][0]["output"].strip() == "A"
    for index in (1, 2, 3):
        assert rows[index][0]["output"].splitlines()[-2:] == ["0", "[]"] and "A" not in rows[index][0]["output"]


def test_sb_06_two_first_calls_create_the_sandbox_twice(engine: Engine, place: Place) -> None:
    """SB-06: six calls at once get one container."""
    place.dataset("a")
    hosts = calls(*(("terminal", {"command": "hostname"}) for _ in range(6)), reasoning="r")
    since = time.time()
    with ScriptedEndpoint([hosts, say("done", reasoning="r")]).in_thread() as endpoint:
        place.run(endpoint.url, DOCKER)
    outputs = [result["output"] for result in results(place.merged()[0])]
    assert len(outputs) == 6 and len(set(outputs)) == 1 and outputs[0].strip()
    assert created(engine, since) == 1


@pytest.mark.parametrize("rows", [pytest.param(50, marks=pytest.mark.soak), 6])
def test_sb_12_host_directories_and_images_pile_up(engine: Engine, place: Place, rows: int) -> None:
    """SB-12: the engine keeps no container, volume, network or layer of a run, also of files that root made."""

    def kept() -> tuple[Any, ...]:
        async def work(client: aiodocker.Docker) -> tuple[Any, ...]:
            async with client._query("system/df") as answer:
                used = await answer.json()
            networks = await client.networks.list()
            return used["LayersSize"], len(used["Containers"] or ()), len(used["Volumes"] or ()), len(networks)

        layers = len(list((engine.root / "data" / "overlay2").iterdir()))
        return *engine.call(work), layers

    place.dataset(*({"prompt": f"task {n}", "image": BUSYBOX} for n in range(rows)))
    command = "head -c 3000000 /dev/zero > /root-file; mkdir -p d && chmod 000 d; ln -s / l; echo ok"
    script = [call("terminal", {"command": command}, reasoning="r"), say("done", reasoning="r")]
    before, files = kept(), set(place.temp.rglob("*"))
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, DOCKER, "--num_workers=2", "--concurrency=8")
    assert len(place.merged()) == rows
    assert kept() == before
    assert set(place.temp.rglob("*")) == files


def test_rows_on_three_images_of_which_one_does_not_exist(engine: Engine, place: Place) -> None:
    """Rows of a missing image fail with the engine's reason before any model call; the others are kept."""
    images = [FULL, BUSYBOX, MISSING]
    place.dataset(*({"prompt": f"task {n}", "docker_image" if n % 2 else "image": images[n % 3]} for n in range(20)))
    script = [call("terminal", {"command": "id -u; pwd"}, reasoning="r"), say("done", reasoning="r")]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, DOCKER, "--num_workers=2", "--concurrency=8", status=3)
        assert endpoint.count == 14 * 2
    kept = {row["prompt_index"]: results(row)[0]["output"].split() for row in place.merged()}
    assert kept == {n: (["1000", "/workspace"], ["0", "/workspace"])[n % 3] for n in range(20) if n % 3 < 2}
    failed = [line for line in place.lines() if line.get("failed")]
    assert sorted(line["prompt_index"] for line in failed) == [2, 5, 8, 11, 14, 17]
    for line in failed:
        assert line["outcome"] == "sandbox_error" and MISSING in line["error"]["message"]
        assert "manifest unknown" in line["error"]["message"]
    assert printed.count("❌ Prompt") == 6
    # Each of the two workers asked once, by a HEAD and perhaps a GET.
    assert engine.pulls(MISSING) <= 4


def test_a_run_says_that_no_engine_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, before anything is written or asked."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place.root}/none.sock")
    place.dataset("a")
    with ScriptedEndpoint([say("done")]).in_thread() as endpoint:
        printed = place.run(endpoint.url, DOCKER, status=1)
        assert endpoint.count == 0
    assert "No container engine answers" in printed and "none.sock" in printed and "Traceback" not in printed
    assert not place.directory.exists()


def test_settings_of_the_environment_reach_the_container(
    engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERMINAL_ENV, _DOCKER_IMAGE, _CWD and _CONTAINER_…; a row's image and cwd come first; no key of ours enters."""
    for name, value in {
        "TERMINAL_ENV": "docker",
        "TERMINAL_DOCKER_IMAGE": BUSYBOX,
        "TERMINAL_CWD": "/var",
        "TERMINAL_CONTAINER_MEMORY": "64",
        "TERMINAL_CONTAINER_CPU": "0.5",
    }.items():
        monkeypatch.setenv(name, value)
    place.dataset({"prompt": "a"}, {"prompt": "b", "image": FULL, "cwd": "below/it"})
    limit = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null"
    command = f"id -u; pwd; {limit}; env; tr '\\0' '\\n' < /proc/1/environ"
    script = [call("terminal", {"command": command}, reasoning="r"), say("done", reasoning="r")]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url)
    first, second = (results(row)[0]["output"] for row in sorted(place.merged(), key=lambda row: row["prompt_index"]))
    assert first.splitlines()[:3] == ["0", "/var", str(64 << 20)]
    assert second.splitlines()[:3] == ["1000", "/workspace/below/it", str(64 << 20)]
    assert "canary" not in first + second and "DOCKER_HOST" not in first + second and os.environ["PATH"] not in second


def test_the_containers_of_an_interrupted_run_are_gone_when_it_ends(engine: Engine, place: Place) -> None:
    place.dataset(*(f"task {n}" for n in range(6)))
    script = [call("terminal", {"command": "sleep 100"}, reasoning="r"), say("done", reasoning="r")]
    with ScriptedEndpoint(script).in_thread() as endpoint, in_flight(place, endpoint.url, DOCKER) as process:
        assert soon(lambda: len(engine.containers("gristmill.owner")) >= 4, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert engine.containers("gristmill.owner") == []
