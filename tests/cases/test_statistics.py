"""Statistics cases at the level of the run directory: what the files hold and what is counted agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.run.layout import Layout
from gristmill.session.spec import Finished
from gristmill.task import Task
from support.rundir import append_all, discarded, failed, kept, merged, open_store, statistics, tasks


async def start(root: Path, prompts: list[str], play: Any, *, refused: int = 0, only: int | None = None) -> None:
    store = open_store(root, prompts, resume=(root / "r").exists(), refused=refused)
    found = store.owed(tasks(prompts), 1)
    first = store.next_batch
    await append_all(store, [play(item.task, first, item.attempt) for item in found.owed[:only]])
    if only is None:
        store.finalize()
    store.close()


def check_all_figures(root: Path) -> dict[str, Any]:
    """Recompute everything from the files alone and compare."""
    rows, found = merged(root), statistics(root)
    tools: dict[str, list[int]] = {}
    for row in rows:
        for name, counts in row["tool_stats"].items():
            entry = tools.setdefault(name, [0, 0, 0])
            for place, which in enumerate(("count", "success", "failure")):
                entry[place] += counts[which]
    for name, entry in found["tool_statistics"].items():
        count, success, failure = tools.get(name, (0, 0, 0))
        assert (entry["count"], entry["success"], entry["failure"]) == (count, success, failure)
        assert entry["success_rate"] == (round(100 * success / count, 2) if count else 0.0)
    for key, total in found["reasoning_statistics"].items():
        assert total == sum(row["reasoning_stats"][key] for row in rows)
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    assert {name: found["outcomes"][name] for name in outcomes} == outcomes
    counts = found["reconcile"]
    assert counts["kept"] == len(rows) == found["trajectories"]["rows"]
    ended = counts["kept"] + counts["discarded"] + counts["filtered"] + counts["failed"]
    assert counts["prompts"] * counts["samples"] + counts["no_longer_in_dataset"] == ended + counts["pending"]
    spent = [
        (line["usage"]["prompt_tokens"], line["usage"]["cost_usd"])
        for path in (root / "r").glob("batch_*.jsonl")
        for line in map(json.loads, path.read_bytes().splitlines())
    ]
    assert found["usage"]["prompt_tokens"] == sum(tokens for tokens, _ in spent)
    assert found["cost_usd"] == round(sum(cost for _, cost in spent), 6)
    return found


async def test_st_04_totals_cover_all_invocations(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        return kept(task, batch, calls=[("terminal", True), ("read_file", task.index % 3 == 0)])

    prompts = [f"task {n}" for n in range(10)]
    await start(tmp_path, prompts, play, only=7)
    await start(tmp_path, prompts, play)
    found = check_all_figures(tmp_path)
    assert found["tool_statistics"]["terminal"]["count"] == 10 and len(merged(tmp_path)) == 10


async def test_st_05_rows_and_statistics_agree_whatever_happens(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        kind = task.index % 6
        if kind == 0 or (kind == 1 and attempt > 1):
            return kept(task, batch, calls=[("terminal", True)])
        if kind == 1 or kind == 5:
            return failed(task, batch, attempt=attempt)
        if kind == 2:
            return discarded(task, batch)
        if kind == 3:
            return kept(task, batch, outcome="output_truncated", calls=())
        return kept(task, batch, calls=[("made_up", False)])

    prompts = [f"task {n}" for n in range(30)]
    await start(tmp_path, prompts, play, refused=4, only=20)
    await start(tmp_path, prompts, play, refused=4)
    found = check_all_figures(tmp_path)
    await start(tmp_path, prompts, play, refused=4)
    found = check_all_figures(tmp_path)
    counts = found["reconcile"]
    assert (counts["kept"], counts["filtered"], counts["discarded"], counts["failed"]) == (15, 5, 5, 5)
    assert found["refused_rows"] == 4 and counts["pending"] == 0
    # Dataset rows = written + failed + discarded + filtered + refused + not started.
    assert 15 + 5 + 5 + 5 + found["refused_rows"] == len(prompts) + 4


async def test_st_06_no_figure_is_zero_for_want_of_reading(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        return kept(task, batch, calls=[("terminal", True)])

    await start(tmp_path, ["a"], play)
    found = check_all_figures(tmp_path)
    (row,) = merged(tmp_path)
    assert row["api_calls"] == 2 and row["usage"]["prompt_tokens"] > 0
    assert found["tool_statistics"]["terminal"]["count"] == 1
    assert found["usage"]["prompt_tokens"] > 0 and found["turns"]["mean"] == 2.0
    assert found["rewards"]["mean"] is None  # nothing was graded: null, not 0


async def test_st_09_a_row_that_took_three_attempts_counts_once(tmp_path: Path) -> None:
    def play(task: Task, batch: int, attempt: int) -> Finished:
        return kept(task, batch) if attempt == 3 else failed(task, batch, attempt=attempt)

    for invocation in range(3):
        await start(tmp_path, ["a"], play)
        found = check_all_figures(tmp_path)
        assert found["attempts"] == invocation + 1
        assert found["reconcile"]["failed"] == (0 if invocation == 2 else 1)
    assert len(merged(tmp_path)) == 1
    assert found["outcomes"] == {"completed": 1} and found["failures_by_reason"] == {}
    # Tool counts are those of the attempt that counts, the money is that of all three.
    assert found["tool_statistics"]["terminal"]["count"] == 1 and found["cost_usd"] == 0.125 * 2 + 0.25
    attempts = [
        json.loads(line)["attempt"]
        for path in sorted((tmp_path / "r").glob("batch_*.jsonl"))
        for line in path.read_bytes().splitlines()
        if b'"failed":true' in line
    ]
    assert attempts == [1, 2] and Layout(tmp_path / "r").checkpoint.exists()
