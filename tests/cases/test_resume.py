"""Resume cases at the level of the run directory: what is owed, what stays, what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataset import read_tasks
from gristmill.errors import RunConflict
from gristmill.run.layout import Layout
from gristmill.run.store import RunStore
from gristmill.session.spec import Finished
from gristmill.task import Task
from support.rundir import (
    TOOLS,
    append_all,
    config,
    discarded,
    failed,
    kept,
    merged,
    open_store,
    statistics,
    tasks,
    texts,
)

Play = Callable[[Task, int, int], Finished]  # task, batch, attempt → what its session comes to


def well(task: Task, batch: int, attempt: int) -> Finished:
    return kept(task, batch)


async def invocation(
    root: Path, prompts: Sequence[str], play: Play = well, *, only: Sequence[str] | None = None, **options: Any
) -> list[str]:
    """One start of a run: every owed session is played, or those of some prompts before a kill. What was owed."""
    resume = (root / "r").exists()
    store = open_store(root, prompts, resume=resume, **options)
    found = store.owed(tasks(prompts), 1)
    first = store.next_batch
    owed = [item.task.text for item in found.owed]
    await append_all(
        store,
        [
            play(item.task, first + place // 2, item.attempt)
            for place, item in enumerate(found.owed)
            if only is None or item.task.text in only
        ],
    )
    if only is None:
        store.finalize()
    store.close()
    return owed


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "r").glob("batch_*.jsonl")}


async def test_re_01_two_rows_with_the_same_prompt(tmp_path: Path) -> None:
    prompts = ["same", "same", "other"]
    assert await invocation(tmp_path, prompts, only=["other"]) == prompts
    store = open_store(tmp_path, prompts, resume=True)
    await append_all(store, [kept(tasks(prompts)[0], 1)])
    store.close()
    assert await invocation(tmp_path, prompts) == ["same"]
    assert sorted(texts(merged(tmp_path))) == sorted(prompts)


async def test_re_02_discarded_rows_are_not_paid_for_again(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        return discarded(task, batch)

    assert await invocation(tmp_path, ["a"], play) == ["a"]
    assert await invocation(tmp_path, ["a"], play) == []
    assert await invocation(tmp_path, ["a"], play) == []
    assert merged(tmp_path) == [] and statistics(tmp_path)["discarded_no_reasoning"] == 1


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (["N1", "N2", "A", "B", "C"], ["N1", "N2", "C"]),  # rows added before the others
        (["C", "B", "A"], ["C"]),  # reordered
        (["B"], []),  # removed
        (["A!", "B", "C"], ["A!", "C"]),  # edited
        (["A", "A", "B", "B"], ["A", "B"]),  # doubled: each copy is a row of its own
    ],
)
async def test_re_03_the_dataset_is_edited_between_runs(tmp_path: Path, after: list[str], expected: list[str]) -> None:
    await invocation(tmp_path, ["A", "B", "C"], only=["A", "B"])
    before = files(tmp_path)
    assert await invocation(tmp_path, after) == expected
    assert {name: files(tmp_path)[name] for name in before} == before
    # Each line tells which row of the present dataset it belongs to: by the key of its content.
    keys = {row["metadata"]["task_key"] for row in merged(tmp_path)}
    assert {task.key for task in tasks(after)} <= keys
    counts = statistics(tmp_path)["reconcile"]
    assert counts["sessions"] == len(after) and counts["pending"] == 0
    assert counts["kept"] == counts["sessions"] + counts["no_longer_in_dataset"]


async def test_re_05_failed_rows_do_not_count_as_done(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        if task.text == "fails":
            return failed(task, batch, attempt=attempt, status=502)
        if task.text == "refused":
            return kept(task, batch, outcome="refused")
        return kept(task, batch)

    prompts = ["ok", "fails", "killed", "refused"]
    await invocation(tmp_path, prompts, play, only=["ok", "fails", "refused"])
    lines = [json.loads(line) for data in files(tmp_path).values() for line in data.splitlines()]
    states = {line.get("prompt") or texts([line])[0]: (line.get("failed"), line["outcome"]) for line in lines}
    assert states == {
        "ok": (None, "completed"),
        "fails": (True, "model_error"),
        "refused": (None, "refused"),  # permanent: an outcome of its own, told apart in the file
    }
    attempts: list[int] = []

    def again(task: Task, batch: int, attempt: int) -> Finished:
        attempts.append(attempt)
        return kept(task, batch)

    assert await invocation(tmp_path, prompts, again) == ["fails", "killed"]
    assert attempts == [2, 1]
    store = open_store(tmp_path, prompts, resume=True)
    assert [o.task.text for o in store.owed(tasks(prompts), 1, ("refused",)).owed] == ["refused"]  # if asked
    store.close()


async def test_re_06_the_summary_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        if task.index == 1:
            return discarded(task, batch)
        return kept(task, batch, calls=[("terminal", task.index % 2 == 0)] * task.index)

    prompts = [f"task {n}" for n in range(8)]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    await invocation(whole, prompts, play)
    await invocation(halves, prompts, play, only=prompts[:4])
    await invocation(halves, prompts, play)
    one, two = statistics(whole), statistics(halves)
    for varying in ("completed_at", "duration_seconds"):
        one.pop(varying), two.pop(varying)
    assert one == two


async def test_re_07_prompts_that_differ_in_outer_whitespace(tmp_path: Path) -> None:
    prompts = ["def f():", "    def f():", "def f():\n"]
    await invocation(tmp_path, prompts, only=prompts[:1])
    assert await invocation(tmp_path, prompts) == prompts[1:]
    assert sorted(texts(merged(tmp_path))) == sorted(prompts)


async def test_re_08_the_same_name_with_another_dataset_is_refused_without_resume(tmp_path: Path) -> None:
    await invocation(tmp_path, [f"a{n}" for n in range(5)])
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    with pytest.raises(RunConflict) as caught:
        open_store(tmp_path, [f"b{n}" for n in range(5)])
    assert "--resume" in str(caught.value) and "--run_name" in str(caught.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before


async def test_re_09_rows_are_named_and_not_counted(tmp_path: Path) -> None:
    prompts = [f"task {n}" for n in range(1, 9)]
    await invocation(tmp_path, prompts, only=prompts[1:6])
    assert await invocation(tmp_path, prompts) == ["task 1", "task 7", "task 8"]


async def test_re_11_resume_with_other_settings(tmp_path: Path) -> None:
    await invocation(tmp_path, ["a", "b"], only=["a"], model="A", distribution="web")
    with pytest.raises(RunConflict, match="model: A → B"):
        await invocation(tmp_path, ["a", "b"], model="B", distribution="default")
    # More rows and more workers are fine; with the flag each row says which model made it.
    await invocation(tmp_path, ["a", "b", "c"], model="A", distribution="web", num_workers=8, only=[])

    def play(task: Task, batch: int, attempt: int) -> Finished:
        made = kept(task, batch)
        return Finished(
            **{name: getattr(made, name) for name in made.__struct_fields__ if name != "row"},
            row=made.row.replace(b'"model":"m"', b'"model":"B"'),
        )

    owed = await invocation(tmp_path, ["a", "b"], play, model="B", distribution="default", allow_changes=True)
    assert owed == ["b"]
    assert [row["metadata"]["model"] for row in merged(tmp_path)] == ["m", "B"]
    manifest = json.loads(Layout(tmp_path / "r").manifest.read_bytes())
    assert "model: A → B" in manifest["invocations"][-1]["changes"]


async def test_re_12_the_stored_prompt_is_the_datasets(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a \\ud83d b"}\n{"prompt": "trail \\n"}\n')
    starts: list[list[str]] = []
    written: set[bytes] = set()
    for resume in (False, True, True):
        read = read_tasks(str(path))
        store = RunStore.open(config(tmp_path), read, known_tools=TOOLS, resume=resume)
        found = store.owed(read.tasks, 1)
        starts.append([item.task.text for item in found.owed])
        await append_all(store, [kept(item.task, store.next_batch) for item in found.owed])
        store.finalize()
        store.close()
        written.add(Layout(tmp_path / "r").trajectories.read_bytes())
    assert len(written) == 1
    assert starts == [["a \ufffd b", "trail \n"], [], []]
    assert texts(merged(tmp_path)) == ["a \ufffd b", "trail \n"]


async def test_re_14_a_stored_outcome_is_read_and_not_judged_again(tmp_path: Path) -> None:
    """A row whose text could be judged otherwise today keeps its outcome; counts never fall."""

    def play(task: Task, batch: int, attempt: int) -> Finished:
        return kept(task, batch, outcome=task.text, text="")

    prompts = ["completed", "turn_limit", "empty_answer", "context_overflow", "session_timeout"]
    await invocation(tmp_path, prompts, play)
    first, rows = statistics(tmp_path), merged(tmp_path)
    for _ in range(2):
        assert await invocation(tmp_path, prompts) == []
        assert merged(tmp_path) == rows
        assert statistics(tmp_path)["outcomes"] == first["outcomes"] == dict.fromkeys(sorted(prompts), 1)


async def test_re_15_files_do_not_grow_with_resumes(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        return failed(task, batch, attempt=attempt) if task.text == "bad" else kept(task, batch)

    prompts = [*(f"task {n}" for n in range(20)), "bad"]
    await invocation(tmp_path, prompts, play)
    size = sum(map(len, files(tmp_path).values()))
    once = len(failed(tasks(prompts)[-1]).row)
    for _ in range(5):
        assert await invocation(tmp_path, prompts, play) == ["bad"]
    assert sum(map(len, files(tmp_path).values())) <= size + 5 * (once + 10)
    assert len(merged(tmp_path)) == 20 and statistics(tmp_path)["attempts"] == 26
