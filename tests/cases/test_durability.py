"""Durability cases at the level of the run directory. More of them, over whole runs, stand in tests/run."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.errors import RunLocked, StoreError
from gristmill.run.checkpoint import Checkpoint
from gristmill.run.layout import Layout
from gristmill.trajectory import decode_row
from support.rundir import append_all, kept, merged, open_store, statistics, tasks, texts

PROMPTS = ["a", "b", "c"]
TASKS = tasks(PROMPTS)
ROW = b'{"prompt_index":0,"conversations":[]}'


@pytest.mark.parametrize(
    ("data", "left", "torn", "damaged"),
    [
        (base64.b64decode("eyJwcm9tcHRfaW5kZXgiOjAsImNvbnZlcnNhdGlvbnMiOltdfQp7InByb21wdF9pbmRleCI6MSwieCI6IuKC"),
         ROW + b"\n", True, []),
        (ROW + b'\n{"prompt_index":1,"conv', ROW + b"\n", True, []),
        (ROW, ROW + b"\n", False, []),
        (ROW + b'\n{bad}\n{"prompt_index":2,"conversations":[]}\n',
         ROW + b'\n{bad}\n{"prompt_index":2,"conversations":[]}\n', False, [2]),
        (b"\n\n", b"\n\n", False, []),
    ],
    ids=["inside a character", "inside a line", "newline lacking", "damage in the middle", "blank lines"],
)  # fmt: skip
async def test_du_02_torn_last_line_then_append(
    tmp_path: Path, data: bytes, left: bytes, torn: bool, damaged: list[int]
) -> None:
    layout = Layout(tmp_path / "r")
    layout.root.mkdir()
    layout.batch(0).write_bytes(data)
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert layout.batch(0).read_bytes() == left
    found = store.owed(TASKS, 1)
    assert [fault.line for fault in found.damaged] == damaged
    assert bool(list(layout.root.glob("batch_0.jsonl.torn-*"))) == torn
    assert any("torn last line" in note for note in store.notes) == torn
    if damaged:
        assert "batch_0.jsonl line 2 is unreadable" in " ".join(store.notes)
    await append_all(store, [kept(item.task, store.next_batch) for item in found.owed])
    store.finalize()
    store.close()
    assert layout.batch(0).read_bytes() == left  # new rows go to a new file
    assert sorted(texts(merged(tmp_path))) == PROMPTS


async def test_du_02_the_row_that_was_torn_runs_again(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "r")
    layout.root.mkdir()
    layout.batch(0).write_bytes(kept(TASKS[0]).row + kept(TASKS[1]).row[:-30])
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert [item.task.text for item in store.owed(TASKS, 1).owed] == ["b", "c"]
    store.close()


CHECKPOINTS = """
import asyncio, sys
from pathlib import Path
from support.rundir import kept, open_store, tasks
prompts = [f"task {n}" for n in range(40)]
async def main():
    store = open_store(Path(sys.argv[1]), prompts)
    store.owed(tasks(prompts), 1)
    print("go", flush=True)
    for task in tasks(prompts):
        await store.append(kept(task, task.index // 5))
asyncio.run(main())
"""


async def test_du_03_no_moment_leaves_an_unreadable_checkpoint(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", CHECKPOINTS, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    checkpoint = Layout(tmp_path / "r").checkpoint
    seen: set[int] = set()
    while writer.poll() is None and len(seen) < 8:
        if checkpoint.exists():
            seen.add(len(json.loads(checkpoint.read_bytes())["completed_prompts"]))
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert len(seen) >= 3
    prompts = [f"task {n}" for n in range(40)]
    recorded = sum(len(path.read_bytes().splitlines()) for path in (tmp_path / "r").glob("batch_*.jsonl"))
    store = open_store(tmp_path, prompts, resume=True)
    found = store.owed(tasks(prompts), 1)
    assert len(found.owed) == 40 - recorded <= 40 - max(seen)
    await append_all(store, [kept(item.task, store.next_batch) for item in found.owed])
    store.finalize()
    store.close()
    assert len(merged(tmp_path)) == 40
    assert json.loads(checkpoint.read_bytes())["completed_prompts"] == list(range(40))


def test_du_03_checkpoints_grow_geometrically() -> None:
    checkpoint = Checkpoint("r", ((n, 1) for n in range(20_000)), [])
    written = 0
    for number in range(20_000):
        checkpoint.note(number, number // 10, no_reasoning=False)
        if checkpoint.due:
            checkpoint.encode()
            written += 1
    assert 20 < written < 120


async def test_du_04_a_full_disk_refuses_everything_that_follows(tmp_path: Path) -> None:
    """Nothing is written after a refusal, earlier rows are whole. A real full disk: tests/run/test_store_crash.py."""
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, [kept(TASKS[0]), kept(TASKS[1])])
    store.layout.batch(1).mkdir()
    with pytest.raises(StoreError, match=r"Cannot write .*batch_1\.jsonl.*disk mounted at"):
        await store.append(kept(TASKS[2], 1))
    with pytest.raises(StoreError):
        await store.append(kept(TASKS[2], 0))
    store.close()
    for line in store.layout.batch(0).read_bytes().splitlines():
        decode_row(line)
    store.layout.batch(1).rmdir()
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert [item.task.text for item in store.owed(TASKS, 1).owed] == ["c"]
    store.close()


OWNER = """
import sys, time
from pathlib import Path
from gristmill.errors import RunLocked, StoreError
from support.rundir import open_store
try:
    store = open_store(Path(sys.argv[1]), ["a"], resume=True)
except RunLocked as error:
    print("refused", error, flush=True)
else:
    print("owner", flush=True)
    sys.stdin.readline()
"""


def owner(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )


def test_du_05_two_processes_on_one_run_directory(tmp_path: Path) -> None:
    both = [owner(tmp_path), owner(tmp_path)]
    said = [process.stdout.readline().split(maxsplit=1) for process in both if process.stdout]
    assert sorted(words[0] for words in said) == ["owner", "refused"]
    winner = both[[words[0] for words in said].index("owner")]
    (refusal,) = [words[1] for words in said if words[0] == "refused"]
    assert f"process {winner.pid}" in refusal
    with pytest.raises(RunLocked, match=str(winner.pid)):
        open_store(tmp_path, ["a"], resume=True)
    winner.send_signal(signal.SIGKILL)
    for process in both:
        process.communicate(timeout=20)
    open_store(tmp_path, ["a"], resume=True).close()  # a lock left by a dead process does not block


async def test_du_11_crash_between_the_last_row_and_the_merge(tmp_path: Path) -> None:
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, [kept(task, task.index) for task in TASKS])
    store.close()  # killed before the merge
    layout = Layout(tmp_path / "r")
    layout.trajectories.with_name(".trajectories.jsonl.999999999.tmp").write_bytes(b"half")  # or during it
    assert not layout.trajectories.exists()
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert not store.owed(TASKS, 1).owed
    store.finalize()
    store.close()
    assert texts(merged(tmp_path)) == PROMPTS and statistics(tmp_path)["reconcile"]["kept"] == 3
    assert not list(layout.root.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("content", "kept_as"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("null", "damaged"),
        ("[]", "damaged"),
        ('{"completed_prompts": "all"}', "damaged"),
        ('{"run_name": "other"}', "foreign"),
        ('{"run_name": "r", "completed_prompts": [0, 1, 2], "batch_stats": {}}', ""),
    ],
)
async def test_du_14_a_damaged_or_foreign_checkpoint_costs_nothing(tmp_path: Path, content: str, kept_as: str) -> None:
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, [kept(TASKS[0]), kept(TASKS[1])])
    store.close()
    layout = Layout(tmp_path / "r")
    layout.checkpoint.write_text(content)
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert [item.task.text for item in store.owed(TASKS, 1).owed] == ["c"]  # the batch files decide
    assert any("checkpoint.json" in note for note in store.notes) == bool(kept_as)
    store.finalize()
    store.close()
    found = json.loads(layout.checkpoint.read_bytes())
    assert found["run_name"] == "r" and found["completed_prompts"] == [0, 1]
    aside = [path.read_text() for path in layout.root.glob(f"checkpoint.json.{kept_as or '*'}-*")]
    assert aside == ([content] if kept_as else [])


def test_du_14_empty_result_files_are_no_obstacle(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "r")
    layout.root.mkdir()
    layout.batch(0).write_bytes(b"")
    layout.trajectories.write_bytes(b"")
    layout.statistics.write_bytes(b"{")
    store = open_store(tmp_path, PROMPTS)
    assert len(store.owed(TASKS, 1).owed) == 3 and store.next_batch == 1
    asyncio.run(append_all(store, [kept(task, 1) for task in TASKS]))
    assert store.finalize().rows == 3
    store.close()
