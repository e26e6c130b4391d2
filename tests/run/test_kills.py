"""SIGKILL at any moment, of the runner or of a worker: nothing finished is lost, doubled or torn, nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from gristmill.testing.endpoint import ScriptedEndpoint
from support.runs import FOUR_CALLS, Place

PROMPTS = 24


def children(pid: int) -> list[int]:
    """Direct children of a process; none where it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:
            pass
    return found


def finished_keys(place: Place) -> Counter[str]:
    """Keys of whole lines in the batch files; a torn last line is not one."""
    keys: Counter[str] = Counter()
    for path in place.directory.glob("batch_*.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            row = json.loads(line)
            keys[row["metadata"]["task_key"] if "metadata" in row else ""] += 1
    return keys


def check_whole(place: Place, endpoint: ScriptedEndpoint) -> None:
    rows = place.merged()
    assert sorted(row["prompt_index"] for row in rows) == list(range(PROMPTS))
    finished = finished_keys(place)
    assert {finished[row["metadata"]["task_key"]] for row in rows} == {1}
    for row in rows:
        assert row["outcome"] == "completed" and row["tool_stats"]["terminal"]["success"] == 2
    counts = place.statistics()["reconcile"]
    assert (counts["kept"], counts["failed"], counts["pending"]) == (PROMPTS, 0, 0)
    assert [p for p in place.temp.rglob("*") if p.is_dir() and p.name.startswith("s-")] == []
    before = endpoint.count
    place.run(endpoint.url, "--resume")
    assert endpoint.count == before  # nothing is owed, nothing is asked


@pytest.mark.parametrize("seed", range(3))
def test_du_03_runner_killed_at_random_moments(place: Place, seed: int) -> None:
    """DU-03: kill -9 of the runner, resume, until it is done."""
    moments = random.Random(seed)
    place.dataset(*(f"task {n}" for n in range(PROMPTS)))
    with ScriptedEndpoint(FOUR_CALLS, latency=0.02).in_thread() as endpoint:
        seen: Counter[str] = Counter()
        for _ in range(4):
            process = place.start(endpoint.url, *(["--resume"] if place.directory.exists() else []))
            time.sleep(moments.uniform(0.3, 2.0))
            below = descendants(process.pid)
            process.kill()
            process.communicate()
            deadline = time.monotonic() + 10
            while alive(below) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert alive(below) == []
            now = finished_keys(place)
            assert now & seen == seen  # what was finished before is still there
            seen = now
        place.run(endpoint.url, "--resume")
        check_whole(place, endpoint)


def test_du_07_workers_killed_at_random_moments(place: Place) -> None:
    """DU-07: kill -9 of a worker; its sessions are given out again, the run ends by itself."""
    moments = random.Random(5)
    place.dataset(*(f"task {n}" for n in range(PROMPTS)))
    with ScriptedEndpoint(FOUR_CALLS, latency=0.3).in_thread() as endpoint:
        process = place.start(endpoint.url)
        killed = 0
        while process.poll() is None and killed < 4:
            time.sleep(moments.uniform(0.1, 0.6))
            workers = [p for p in children(process.pid) if b"gristmill.build" in cmdline(p) and children(p)]
            if workers:
                os.kill(moments.choice(workers), signal.SIGKILL)
                killed += 1
        printed, _ = process.communicate(timeout=120)
        assert list(place.temp.iterdir()) == []  # also of the last one that was killed
        # A session that lost three workers is given up for now, said so, and owed.
        given_up = sum(
            line.startswith("❌ Prompt") and "worker process died 3 times" in line for line in printed.splitlines()
        )
        assert killed and process.returncode == (3 if given_up else 0), printed
        assert place.statistics()["reconcile"]["failed"] == given_up
        if given_up:
            place.run(endpoint.url, "--resume")
        check_whole(place, endpoint)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly_and_it_resumes(place: Place, sent: signal.Signals) -> None:
    place.dataset(*(f"task {n}" for n in range(PROMPTS)))
    with ScriptedEndpoint(FOUR_CALLS, latency=0.1).in_thread() as endpoint:
        process = place.start(endpoint.url)
        assert process.stdout is not None
        while "Prompt" not in (line := process.stdout.readline()):
            assert line  # it has not ended
        below = descendants(process.pid)
        process.send_signal(sent)
        printed, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + sent, printed
        assert "Traceback" not in printed
        assert alive(below) == []
        counts = place.statistics()["reconcile"]
        assert counts["kept"] + counts["failed"] + counts["pending"] == PROMPTS and counts["kept"] < PROMPTS
        place.run(endpoint.url, "--resume")
        assert len(place.merged()) == PROMPTS
