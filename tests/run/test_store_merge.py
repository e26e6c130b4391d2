"""The merge: order, one schema, filters, what comes first, and that it happens at once or not at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest

from gristmill import events
from gristmill.errors import SetupError, StoreError
from gristmill.quality.filters import parse_filters
from gristmill.run.layout import Layout
from gristmill.run.reader import RunReader
from gristmill.task import Task
from support.rundir import (
    append_all,
    discarded,
    failed,
    kept,
    lines,
    merged,
    open_store,
    statistics,
    tasks,
    texts,
)

PROMPTS = [f"task {n}" for n in range(12)]
TASKS = tasks(PROMPTS)


async def fill(root: Path, *sessions: Any, prompts: list[str] = PROMPTS, **options: Any) -> Any:
    store = open_store(root, prompts, **options)
    store.owed(tasks(prompts), 1)
    await append_all(store, sessions)
    report = store.finalize()
    store.close()
    return report


async def test_files_go_by_number_and_lines_by_place(tmp_path: Path) -> None:
    order = [(3, 0), (7, 2), (1, 2), (5, 10), (0, 10), (2, 9)]
    await fill(tmp_path, *(kept(TASKS[index], batch) for index, batch in order))
    assert [row["prompt_index"] for row in merged(tmp_path)] == [3, 7, 1, 2, 5, 0]


async def test_rows_are_copied_byte_for_byte(tmp_path: Path) -> None:
    sessions = [kept(task, task.index // 3, text="Ünï 😀 \u2028 \x00") for task in TASKS]
    await fill(tmp_path, *sessions)
    assert Layout(tmp_path / "r").trajectories.read_bytes() == b"".join(s.row for s in sessions)


async def test_a_row_with_a_tool_call_comes_first(tmp_path: Path) -> None:
    await fill(tmp_path, *(kept(task, 0, calls=() if task.index != 7 else [("terminal", True)]) for task in TASKS))
    assert [row["prompt_index"] for row in merged(tmp_path)] == [7, *(n for n in range(12) if n != 7)]


async def test_a_filtered_row_never_leads(tmp_path: Path) -> None:
    calls = {3: [("made_up", False)], 5: [("terminal", True)]}
    report = await fill(tmp_path, *(kept(task, 0, calls=calls.get(task.index, ())) for task in TASKS))
    assert merged(tmp_path)[0]["prompt_index"] == 5
    assert report.filtered == {"unknown_tool": 1} and report.rows == 11


async def test_columns_that_a_loader_would_take_for_something_else_are_shown_first(tmp_path: Path) -> None:
    ids = {n: f"2026-01-{n + 1:02}" for n in range(12)} | {9: "nine"}
    dated = [Task(index=t.index, line=t.line, key=t.key, text=t.text, row_id=ids[t.index]) for t in TASKS]
    sessions = [
        kept(
            task,
            0,
            calls=[("terminal", True)] if task.index == 4 else (),
            toolsets_used=["file"] if task.index == 6 else [],
        )
        for task in dated
    ]
    await fill(tmp_path, *sessions)
    assert {row["prompt_index"] for row in merged(tmp_path)[:3]} == {4, 6, 9}
    assert len(merged(tmp_path)) == 12
    first = pyarrow.json.read_json(io.BytesIO(b"".join(s.row for s in sessions[:3])))
    assert str(first.schema.field("metadata").type.field("row_id").type) == "timestamp[s]"  # what it guards against
    together = pyarrow.json.read_json(Layout(tmp_path / "r").trajectories)
    assert str(together.schema.field("metadata").type.field("row_id").type) == "string"


async def test_merging_again_with_other_filters_brings_rows_back(tmp_path: Path) -> None:
    await fill(
        tmp_path,
        kept(TASKS[0], calls=[("made_up", False)]),
        kept(TASKS[1], graded=True, reward=1.0),
        kept(TASKS[2], graded=True, reward=0.25, outcome="turn_limit"),
        discarded(TASKS[3]),
        failed(TASKS[4]),
    )
    assert texts(merged(tmp_path)) == ["task 1", "task 2"]
    batch_files = Layout(tmp_path / "r").batch(0).read_bytes()
    for filters, expected in (
        ("none", [0, 1, 2]),
        ("unknown_tool,completed_only", [1]),
        ("min_reward=0.2", [1, 2]),
        ("min_reward=0.5,min_tool_calls=1", [1]),
        ("max_tokens=10", []),
    ):
        with RunReader(tmp_path / "r") as reader:
            report = reader.merge(parse_filters(filters))
        assert [row["prompt_index"] for row in merged(tmp_path)] == expected
        counts = statistics(tmp_path)["reconcile"]
        assert counts["kept"] == report.rows == len(expected)
        assert counts["kept"] + counts["filtered"] == 3 and counts["pending"] == 7
        assert sum(report.filtered.values()) == counts["filtered"]
    assert Layout(tmp_path / "r").batch(0).read_bytes() == batch_files


async def test_duplicates_are_left_out_by_conversation(tmp_path: Path) -> None:
    prompts = ["same", "same", "other"]
    heard: list[events.Event] = []
    sessions = [kept(task) for task in tasks(prompts)]
    await fill(tmp_path, *sessions, prompts=prompts)
    with RunReader(tmp_path / "r") as reader:
        reader.merge(parse_filters("duplicates"), heard.append)
    assert texts(merged(tmp_path)) == ["same", "other"]
    assert heard[1:] == [
        events.Filtered(batch=0, filter="duplicates", reason="the same conversation as an earlier row")
    ]


async def test_unreadable_lines_are_left_out_and_named(tmp_path: Path) -> None:
    await fill(tmp_path, kept(TASKS[0]), kept(TASKS[1]))
    path = Layout(tmp_path / "r").batch(0)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"p":"ok"}\n\x00\x00\x00\n' + second)
    with RunReader(tmp_path / "r") as reader:
        report = reader.merge()
    assert [(d.file, d.line) for d in report.unreadable] == [("batch_0.jsonl", 2), ("batch_0.jsonl", 3)]
    assert len(merged(tmp_path)) == 2 and statistics(tmp_path)["unreadable_lines"] == 2


async def test_rows_in_another_form_get_the_schema_of_the_run(tmp_path: Path) -> None:
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, [kept(TASKS[0])])
    own = kept(TASKS[1]).row
    odd = json.loads(own)
    odd["usage"]["cost_usd"] = 1
    odd["metadata"]["row_id"] = None
    odd["error"] = None
    del odd["reward"]
    store.layout.batch(1).write_text(json.dumps(odd) + "\n")
    store.close()
    store = open_store(tmp_path, PROMPTS, resume=True)
    store.finalize()
    store.close()
    data = Layout(tmp_path / "r").trajectories.read_bytes().splitlines(keepends=True)
    assert pyarrow.json.read_json(io.BytesIO(data[0])).schema == pyarrow.json.read_json(io.BytesIO(data[1])).schema
    assert list(json.loads(data[1])) == list(json.loads(data[0]))
    assert b'"cost_usd":1.0' in data[1]


def test_an_empty_run_merges_to_an_empty_file(tmp_path: Path) -> None:
    store = open_store(tmp_path, PROMPTS)
    report = store.finalize()
    store.close()
    assert (report.rows, report.files) == (0, 0)
    assert Layout(tmp_path / "r").trajectories.read_bytes() == b""
    assert statistics(tmp_path)["reconcile"]["pending"] == 12


async def test_the_merged_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Killed in the middle of the merge, whose listener never returns."""
    await fill(tmp_path, *(kept(task) for task in TASKS[:3]))
    old = Layout(tmp_path / "r").trajectories.read_bytes()
    script = (
        "import os, signal, sys\n"
        "from gristmill.run.reader import RunReader\n"
        "from gristmill.quality.filters import parse_filters\n"
        "def stop(event):\n"
        "    if type(event).__name__ == 'Filtered': os.kill(os.getpid(), signal.SIGKILL)\n"
        "RunReader(sys.argv[1]).merge(parse_filters('max_tokens=1'), stop)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "r")], check=False)
    assert done.returncode == -9
    assert Layout(tmp_path / "r").trajectories.read_bytes() == old
    assert list((tmp_path / "r").glob(".trajectories.jsonl.*.tmp"))
    open_store(tmp_path, PROMPTS, resume=True).close()
    assert not list((tmp_path / "r").glob(".*.tmp"))  # the next start sweeps up


async def test_a_merge_that_cannot_be_written_leaves_the_old_files(tmp_path: Path) -> None:
    await fill(tmp_path, kept(TASKS[0]))
    layout = Layout(tmp_path / "r")
    old = layout.trajectories.read_bytes()
    layout.root.joinpath(f".trajectories.jsonl.{os.getpid()}.tmp").mkdir()
    with RunReader(layout.root) as reader, pytest.raises(StoreError, match="Cannot write"):
        reader.merge()
    assert layout.trajectories.read_bytes() == old


async def test_a_merge_is_possible_while_the_run_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, PROMPTS)
    store.owed(TASKS, 1)
    await append_all(store, [kept(TASKS[0]), kept(TASKS[1])])
    with RunReader(tmp_path / "r") as reader:
        assert reader.merge().rows == 2
        await append_all(store, [kept(TASKS[2], 1)])
        reader.refresh()
        assert reader.merge().rows == 3
    assert store.finalize().rows == 3
    store.close()


async def test_the_reader_sees_rows_records_and_figures(tmp_path: Path) -> None:
    await fill(tmp_path, kept(TASKS[0]), failed(TASKS[1], 1), kept(TASKS[2], 1))
    sessions = Layout(tmp_path / "r").sessions(1)
    sessions.write_bytes(sessions.read_bytes() + b"\x28\xb5\x2f\xfd\x04")  # a frame that a crash cut off
    with RunReader(tmp_path / "r") as reader:
        assert reader.manifest.model == "m" and reader.damage() == []
        assert [row["prompt_index"] for row in reader.rows()] == [0, 2]
        assert [s.state for s in reader.summaries()] == ["kept", "failed", "kept"]
        assert [reader.read(line)["prompt_index"] for line in reader.lines()] == [0, 1, 2]
        record = reader.read_record(1, 2)
        assert record is not None and record["state"] == "kept"
        assert reader.read_record(1, 5) is None and reader.read_record(9, 0) is None
        assert [r["prompt_index"] for r in reader.records(1)] == [1, 2]
        counts = reader.statistics()["reconcile"]
        assert (counts["kept"], counts["failed"], counts["pending"]) == (2, 1, 9)
        assert reader.merged_statistics() == statistics(tmp_path)


def test_what_is_no_run_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is no run directory"):
        RunReader(tmp_path)


async def test_resume_without_batch_files_keeps_the_merged_result_under_another_name(tmp_path: Path) -> None:
    await fill(tmp_path, kept(TASKS[0]))
    layout = Layout(tmp_path / "r")
    layout.batch(0).unlink()
    store = open_store(tmp_path, PROMPTS, resume=True)
    assert "trajectories.jsonl" in " ".join(store.notes)
    store.close()
    (kept_as,) = layout.root.glob("trajectories.jsonl.earlier-*")
    assert len(lines(kept_as)) == 1
