"""Limits of sandboxes and the warm pool in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.sandbox.limits import limits_held
from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from support.runs import Place

KIND = "support.slow_sandbox:SlowSandboxes"


def results(row: dict[str, object]) -> list[str]:
    turns = row["conversations"]
    assert isinstance(turns, list)
    return [turn["value"] for turn in turns if turn["from"] == "tool"]


def test_a_limit_that_was_reached_is_told_to_the_model(place: Place) -> None:
    if "--sandbox_memory" not in limits_held()[0]:
        pytest.skip("this machine cannot hold a sandbox to its memory")
    place.dataset("task")
    hog = call("terminal", {"command": "python3 -c 'x = bytearray(1 << 30)'"}, reasoning="r")
    fill = call("terminal", {"command": "head -c 9M /dev/zero > x"}, reasoning="r")
    with ScriptedEndpoint([hog, fill, say("done", reasoning="r")]).in_thread() as endpoint:
        place.run(endpoint.url, "--sandbox_memory=96", "--sandbox_disk=8")
    (row,) = place.merged()
    killed, full = results(row)
    assert row["outcome"] == "completed"
    assert (
        "The memory limit of 96 MiB was reached, and a process was killed." in killed and '"exit_code": 137' in killed
    )
    assert "No space left on device" in full
    settings = json.loads((place.directory / "run.json").read_text())["settings"]
    assert settings["sandbox"]["limits"] == {"memory_mb": 96, "disk_mb": 8, "cpus": 0.0, "processes": 0}


def test_a_limit_that_does_not_hold_is_told_before_the_run(place: Place, endpoint: ScriptedEndpoint) -> None:
    place.dataset("task")
    printed = place.run(endpoint.url, "--sandbox=host", "--sandbox_disk=8", status=1)
    assert "--sandbox=host cannot hold to --sandbox_disk on this machine." in printed
    assert endpoint.count == 0


def test_sessions_get_what_the_pool_has_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    place.dataset("one", "two", {"prompt": "three", "cwd": "own"})
    look = call("terminal", {"command": "cat ~/../workspace/made_for ~/../workspace/own/made_for"}, reasoning="r")
    with ScriptedEndpoint([look, say("done", reasoning="r")]).in_thread() as endpoint:
        place.run(endpoint.url, f"--sandbox={KIND}", "--sandbox_pool=1", "--num_workers=1", "--concurrency=1")
    made_for = [results(row)[0] for row in sorted(place.merged(), key=lambda row: int(row["prompt_index"]))]
    assert "pool-1" in made_for[0] and "pool-2" in made_for[1]
    assert "2-0-" in made_for[2] and "pool" not in made_for[2]  # a row with a directory of its own
    assert not list(place.temp.glob("gristmill-*"))


def test_a_pool_without_effect_is_told(place: Place, endpoint: ScriptedEndpoint) -> None:
    place.dataset("task")
    printed = place.run(endpoint.url, "--sandbox_pool=2", "--dry_run")
    assert "Without effect with --sandbox=local, which starts at once: --sandbox_pool." in printed
