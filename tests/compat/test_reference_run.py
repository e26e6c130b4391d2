"""A run directory that the reference made: resumed, merged, and left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from gristmill import events
from gristmill.dataset import read_tasks
from gristmill.quality.filters import parse_filters
from gristmill.run.reader import RunReader
from gristmill.run.store import RunStore
from gristmill.task import task_digest
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from gristmill.trajectory import Row
from support.rundir import config, dataset, kept, merged, statistics, texts

REFERENCE = Path(__file__).parents[1] / "data" / "reference_run"
DATASET = read_tasks(str(REFERENCE / "dataset.jsonl"))
TOOLS = tuple(TOOL_TO_TOOLSET_MAP)
FILTERS = parse_filters("no_reasoning,unknown_tool")
BATCHES = {n: (REFERENCE / "data" / "golden1" / f"batch_{n}.jsonl").read_bytes() for n in range(3)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(REFERENCE / "data", tmp_path / "data")
    return tmp_path / "data"


def resume(root: Path, **changes: object) -> RunStore:
    settings = config(root, run_name="golden1", distribution="terminal_only", **changes)
    return RunStore.open(settings, DATASET, known_tools=TOOLS, resume=True, filters=FILTERS)


async def test_five_prompts_are_done_by_content_and_one_is_owed(root: Path) -> None:
    store = resume(root)
    found = store.owed(DATASET.tasks, 1)
    assert [(o.task.index, o.task.text, o.attempt) for o in found.owed] == [
        (4, "[S:noreason] What is the capital of France?", 1)
    ]
    assert (found.completed, found.beyond, store.next_batch, store.notes) == (5, 0, 3, ())
    assert store.manifest.made_by == "reference" and "kanban_show" in store.manifest.adopted_tools
    assert "frobnicate_disk" not in store.manifest.adopted_tools
    assert "terminal" not in store.manifest.adopted_tools and store.manifest.known_tools == list(TOOLS)
    await store.append(kept(DATASET.tasks[4], 3, tools=TOOLS))
    report = store.finalize()
    store.close()
    assert {n: (root / "golden1" / f"batch_{n}.jsonl").read_bytes() for n in BATCHES} == BATCHES
    assert (report.rows, report.filtered) == (5, {"unknown_tool": 1})
    again = resume(root)
    assert not again.owed(DATASET.tasks, 1).owed
    again.close()


async def test_all_rows_of_the_merged_file_have_one_schema(root: Path) -> None:
    store = resume(root)
    store.owed(DATASET.tasks, 1)
    await store.append(kept(DATASET.tasks[4], 3, tools=TOOLS))
    store.finalize()
    store.close()
    rows = merged(root, "golden1")
    assert [r["prompt_index"] for r in rows] == [0, 1, 2, 3, 4]
    for found in rows:
        assert list(found) == list(Row.__struct_fields__)
        assert list(found["tool_stats"]) == list(found["tool_error_counts"]) == list(TOOLS)
    first = rows[0]
    (called,) = first["conversations"][2]["tool_calls"]
    assert called["id"] == "call_term_0" and called["name"] == "terminal"
    assert json.loads(called["arguments"])["command"].startswith("pwd && echo hello")
    assert [call["id"] for call in rows[2]["conversations"][2]["tool_calls"]] == ["call_p_0", "call_p_1"]
    assert first["conversations"][1]["value"] == "[S:term] Create a file with hello in it."
    assert first["outcome"] == "completed" and first["tool_stats"]["terminal"]["success"] == 1
    assert first["reasoning_stats"]["turns_with_reasoning"] == 2
    assert first["metadata"]["timestamp"].startswith("2026-11-29T14:31:53.352315")
    assert first["usage"]["cost_known"] is False and first["usage"]["prompt_tokens"] == 0
    # Our own row is copied as it stands.
    data = (root / "golden1" / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    assert data[4] == (root / "golden1" / "batch_3.jsonl").read_bytes()


async def test_statistics_agree_with_what_the_reference_counted(root: Path) -> None:
    theirs = json.loads((root / "golden1" / "statistics.json").read_bytes())
    with RunReader(root / "golden1", TOOLS) as reader:
        reader.merge()  # without filters, as the reference counts
    ours = statistics(root, "golden1")
    for key in ("run_name", "distribution", "total_prompts", "total_batches", "batch_size", "model"):
        assert ours[key] == theirs[key], key
    assert ours["reasoning_statistics"] == theirs["reasoning_statistics"]
    for name in ("terminal", "write_file", "read_file", "search_files"):
        assert ours["tool_statistics"][name] == theirs["tool_statistics"][name]
    assert ours["unknown_tool_calls"] == {"frobnicate_disk": 1}  # theirs makes it a tool
    assert ours["cost_usd"] is None and ours["reconcile"]["kept"] == 5


async def test_the_filter_speaks_as_the_reference_does(root: Path) -> None:
    said: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Filtered):
            said.append(FILTERS[1].message(event.batch, event.reason))

    with RunReader(root / "golden1", TOOLS) as reader:
        reader.merge(FILTERS, listen)
    assert said == ["⚠️  Filtering corrupted entry (batch 2): invalid tool 'frobnicate_disk'"]
    assert texts(merged(root, "golden1"))[-1].startswith("[S:leak_set]")


async def test_tools_of_the_reference_that_were_called_get_a_column(root: Path) -> None:
    path = root / "golden1" / "batch_1.jsonl"
    path.write_bytes(
        path.read_bytes().replace(
            b'"kanban_show": {"count": 0, "success": 0', b'"kanban_show": {"count": 1, "success": 1', 1
        )
    )
    store = resume(root)
    store.owed(DATASET.tasks, 1)
    store.finalize()
    store.close()
    rows = merged(root, "golden1")
    assert {tuple(r["tool_stats"]) for r in rows} == {(*TOOLS, "kanban_show")}
    assert rows[2]["tool_stats"]["kanban_show"]["count"] == 1


async def test_a_row_of_the_reference_that_is_run_again_is_replaced(root: Path) -> None:
    path = root / "golden1" / "batch_0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"completed": true', b'"completed": false', 1))
    store = resume(root)
    found = store.owed(DATASET.tasks, 1, ("turn_limit",))
    assert [(o.task.index, o.attempt) for o in found.owed] == [(0, 2), (4, 1)]
    await store.append(kept(DATASET.tasks[0], 3, tools=TOOLS, text="better"))
    store.close()
    (root / "golden1" / "index.sqlite").unlink()  # which row replaces which is known without the cache
    store = resume(root)
    assert [o.task.index for o in store.owed(DATASET.tasks, 1).owed] == [4]
    report = store.finalize()
    store.close()
    assert report.replaced == 1
    (again,) = [r for r in merged(root, "golden1") if r["prompt_index"] == 0]
    assert again["conversations"][-1]["value"].endswith("better")


async def test_prompts_match_by_their_exact_text(root: Path) -> None:
    texts_before = [task.text for task in DATASET.tasks]
    moved = [texts_before[5], texts_before[0] + " ", *texts_before[:3]]
    settings = config(root, run_name="golden1")
    store = RunStore.open(settings, dataset(moved), known_tools=TOOLS, resume=True)
    found = store.owed(dataset(moved).tasks, 1)
    assert [o.task.text for o in found.owed] == [texts_before[0] + " "]
    assert found.beyond == 1  # the fourth prompt is gone from the dataset, its row is not
    store.close()


async def test_a_prompt_with_an_image_matches_by_its_text_too(root: Path) -> None:
    first = DATASET.tasks[0]
    task = msgspec.structs.replace(
        first, image="python:3.11", key=task_digest({"prompt": first.text, "image": "python:3.11"})
    )
    store = resume(root)
    assert not store.owed((task,), 1).owed
    store.close()


async def test_the_checkpoint_keeps_its_form(root: Path) -> None:
    theirs = json.loads((root / "golden1" / "checkpoint.json").read_bytes())
    store = resume(root)
    store.owed(DATASET.tasks, 1)
    store.finalize()
    store.close()
    ours = json.loads((root / "golden1" / "checkpoint.json").read_bytes())
    assert list(ours) == list(theirs)
    assert ours["completed_prompts"] == [0, 1, 2, 3, 5]
    assert ours["batch_stats"]["0"] == theirs["batch_stats"]["0"]
    assert not list((root / "golden1").glob("checkpoint.json.*"))  # theirs was sound


def test_rows_of_ours_hold_all_keys_of_theirs() -> None:
    theirs = json.loads(BATCHES[0].splitlines()[0])
    ours = json.loads(kept(DATASET.tasks[0], tools=TOOLS).row)
    assert set(theirs) <= set(ours) and set(theirs["metadata"]) <= set(ours["metadata"])
