"""The run store: opening, what is owed, conflicts, locks, statistics over several invocations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill import events
from gristmill.errors import RunConflict, RunLocked, StoreError, UsageError
from gristmill.run.index import Slot
from gristmill.run.layout import Layout
from gristmill.run.resume import match
from support.rundir import (
    append_all,
    dataset,
    discarded,
    failed,
    kept,
    merged,
    open_store,
    statistics,
    tasks,
    texts,
)

ABC = ["a", "b", "c"]


async def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    found = store.owed(tasks(ABC), 1)
    assert [(o.task.text, o.sample, o.attempt) for o in found.owed] == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]
    assert (found.completed, found.sessions, store.next_batch, store.resumed) == (0, 3, 0, False)
    a, b, c = tasks(ABC)
    await append_all(store, [kept(a), kept(b), kept(c, 1, calls=[("terminl", False)])])
    heard: list[events.Event] = []
    report = store.finalize(heard.append, 2.5)
    store.close()
    assert (report.rows, report.files, report.filtered) == (2, 2, {"unknown_tool": 1})
    assert heard == [
        events.Merging(files=2),
        events.Filtered(batch=1, filter="unknown_tool", reason="invalid tool 'terminl'"),
    ]
    assert report.statistics == statistics(tmp_path) and report.statistics["duration_seconds"] == 2.5
    assert texts(merged(tmp_path)) == ["a", "b"]
    directory = Layout(tmp_path / "r")
    assert sorted(path.name for path in directory.root.iterdir()) == [
        ".lock",
        "batch_0.jsonl",
        "batch_1.jsonl",
        "checkpoint.json",
        "index.sqlite",
        "run.json",
        "sessions_0.jsonl.zst",
        "sessions_1.jsonl.zst",
        "statistics.json",
        "trajectories.jsonl",
    ]
    manifest = json.loads(directory.manifest.read_bytes())
    assert manifest["seed"] == 7 and manifest["known_tools"] == ["terminal", "process", "read_file", "write_file"]
    assert manifest["invocations"][0]["ended"] and manifest["invocations"][0]["seconds"] == 2.5


async def test_a_directory_with_outcomes_is_refused_without_resume(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    await append_all(store, [failed(tasks(ABC)[0])])
    store.close()
    with pytest.raises(RunConflict) as caught:
        open_store(tmp_path, ABC)
    assert "--resume" in str(caught.value) and "--run_name" in str(caught.value)
    open_store(tmp_path, ABC, resume=True).close()  # the refusal left no lock behind


def test_an_empty_directory_is_no_conflict_and_resume_of_nothing_starts(tmp_path: Path) -> None:
    open_store(tmp_path, ABC).close()
    open_store(tmp_path, ABC).close()
    store = open_store(tmp_path, ABC, resume=True)
    assert not store.resumed and len(store.owed(tasks(ABC), 1).owed) == 3
    store.close()


async def test_the_seed_is_drawn_once(tmp_path: Path) -> None:
    first = open_store(tmp_path, ABC, seed=None)
    await append_all(first, [kept(tasks(ABC)[0])])
    first.close()
    again = open_store(tmp_path, ABC, seed=None, resume=True)
    assert again.seed == first.seed and again.run_id == first.run_id
    again.close()
    with pytest.raises(RunConflict, match="seed"):
        open_store(tmp_path, ABC, seed=first.seed + 1, resume=True)


async def test_changed_settings_are_listed_and_refused_unless_allowed(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC, model="A", distribution="web")
    await append_all(store, [kept(tasks(ABC)[0])])
    store.close()
    changed = {"model": "B", "distribution": "default", "max_turns": 3, "resume": True}
    with pytest.raises(RunConflict) as caught:
        open_store(tmp_path, ABC, **changed)
    for words in ("model: A → B", "distribution: web → default", "max_turns: 10 → 3", "--allow_changes"):
        assert words in str(caught.value)
    allowed = open_store(tmp_path, ABC, **changed, allow_changes=True)
    assert set(allowed.changes) == {"model: A → B", "distribution: web → default", "max_turns: 10 → 3"}
    assert allowed.manifest.invocations[-1].changes == list(allowed.changes)
    await append_all(allowed, [kept(tasks(ABC)[1], 1)])
    allowed.close()
    open_store(tmp_path, ABC, **changed).close()  # they are the run's own now


async def test_what_shapes_no_row_may_change_freely(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    await append_all(store, [kept(tasks(ABC)[0])])
    store.close()
    more = [*ABC, "d"]
    free = {"num_workers": 1, "batch_size": 50, "max_samples": 4, "max_cost": 1.0, "verbosity": "quiet", "retry": ()}
    store = open_store(tmp_path, more, resume=True, **free)
    assert store.changes == () and len(store.owed(tasks(more), 1).owed) == 3
    store.close()


async def test_settings_may_change_while_only_failures_are_on_record(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC, model="typo")
    await append_all(store, [failed(task) for task in tasks(ABC)])
    store.close()
    store = open_store(tmp_path, ABC, model="right", resume=True)
    assert store.changes == ("model: typo → right",)
    assert [o.attempt for o in store.owed(tasks(ABC), 1).owed] == [2, 2, 2]
    store.close()


def test_secrets_stay_out_of_the_manifest(tmp_path: Path) -> None:
    from gristmill.config import ModelConfig
    from gristmill.run.store import RunStore
    from support.rundir import config

    model = ModelConfig(name="m", base_url="https://user:pw@example.org/v1?key=k", api_key="sk-secret")
    given_config = config(
        tmp_path, tool_settings={"TAVILY_API_KEY": "tv-secret"}, ephemeral_system_prompt="hidden words"
    )
    import msgspec

    RunStore.open(msgspec.structs.replace(given_config, model=model), dataset(ABC), known_tools=("t",)).close()
    text = Layout(tmp_path / "r").manifest.read_text()
    for secret in ("sk-secret", "tv-secret", "hidden words", "pw@", "key=k"):
        assert secret not in text
    assert "example.org" in text


def test_a_second_owner_is_refused_with_the_pid(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        open_store(tmp_path, ABC, resume=True)
    store.close()
    store.close()
    open_store(tmp_path, ABC).close()


def test_a_lock_of_a_dead_process_does_not_block(tmp_path: Path) -> None:
    lock = tmp_path / "r" / ".lock"
    lock.parent.mkdir()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    lock.write_text(f"{int(dead.stdout)} somewhere\n")
    open_store(tmp_path, ABC).close()


def test_a_directory_that_cannot_be_made_is_an_error_with_the_disk(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file")
    with pytest.raises(StoreError, match=r"Cannot write .*disk mounted at"):
        open_store(tmp_path, ABC)


async def test_samples_are_owed_one_by_one(tmp_path: Path) -> None:
    store = open_store(tmp_path, ["a", "b"], samples_per_prompt=3)
    a, b = tasks(["a", "b"])
    await append_all(store, [kept(a, sample=0), kept(a, sample=2), failed(b, sample=1), discarded(b, sample=2)])
    store.close()
    store = open_store(tmp_path, ["a", "b"], samples_per_prompt=3, resume=True)
    found = store.owed((a, b), 3)
    assert [(o.task.text, o.sample, o.attempt) for o in found.owed] == [("a", 1, 1), ("b", 0, 1), ("b", 1, 2)]
    assert (found.completed, found.completed_prompts) == (3, 0)
    await append_all(store, [kept(a, 1, sample=1)])
    counts = store.finalize().statistics["reconcile"]
    store.close()
    assert (counts["sessions"], counts["kept"], counts["discarded"], counts["failed"], counts["pending"]) == (
        6,
        3,
        1,
        1,
        1,
    )
    assert json.loads(Layout(tmp_path / "r").checkpoint.read_bytes())["completed_prompts"] == [0]


async def test_retry_runs_settled_outcomes_again_and_the_last_row_counts(tmp_path: Path) -> None:
    a, b, c = tasks(ABC)
    store = open_store(tmp_path, ABC)
    await append_all(store, [kept(a, outcome="turn_limit", text="first"), kept(b), discarded(c)])
    store.close()
    store = open_store(tmp_path, ABC, resume=True)
    assert not store.owed((a, b, c), 1).owed
    with pytest.raises(UsageError, match=r"no_such.*turn_limit"):
        store.owed((a, b, c), 1, ("no_such",))
    found = store.owed((a, b, c), 1, ("turn_limit", "no_reasoning"))
    assert [(o.task.text, o.attempt) for o in found.owed] == [("a", 2), ("c", 2)]
    assert [o.task.text for o in store.owed((a, b, c), 1, ("discarded",)).owed] == ["c"]
    await append_all(store, [kept(a, 1, text="second"), failed(c, 1, attempt=2)])
    report = store.finalize()
    store.close()
    assert report.replaced == 1
    rows = merged(tmp_path)
    assert texts(rows) == ["b", "a"] and rows[1]["conversations"][-1]["value"].endswith("second")
    # The failed retry of the discard takes nothing away: the discard still counts.
    assert report.statistics["discarded_no_reasoning"] == 1 and report.statistics["attempts"] == 5
    assert report.statistics["outcomes"] == {"completed": 2}


async def test_a_failed_retry_does_not_lose_the_row_it_was_to_replace(tmp_path: Path) -> None:
    (a,) = tasks(["a"])
    store = open_store(tmp_path, ["a"])
    await append_all(store, [kept(a, outcome="turn_limit")])
    store.close()
    store = open_store(tmp_path, ["a"], resume=True)
    assert len(store.owed((a,), 1, ("turn_limit",)).owed) == 1
    await append_all(store, [failed(a, 1, attempt=2)])
    assert store.finalize().rows == 1
    store.close()
    store = open_store(tmp_path, ["a"], resume=True)
    assert not store.owed((a,), 1).owed
    assert [o.attempt for o in store.owed((a,), 1, ("turn_limit",)).owed] == [3]
    store.close()


async def test_a_killed_invocation_is_closed_with_the_time_of_its_last_row(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    await append_all(store, [kept(tasks(ABC)[0])])
    store.close()  # not finalized, as after a kill
    store = open_store(tmp_path, ABC, resume=True)
    killed, present = store.manifest.invocations
    assert killed.reason == "killed" and killed.ended and 0 <= killed.seconds < 60
    assert present.ended == ""
    store.close()


async def test_new_batches_come_after_everything_that_has_a_number(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    await append_all(store, [kept(tasks(ABC)[0], 4)])
    assert store.next_batch == 5
    store.layout.sessions(11).write_bytes(b"")  # its rows were lost in a crash
    (store.layout.root / "batch_99.jsonl.torn-1").write_bytes(b"")
    (store.layout.root / "batch_007.jsonl").write_bytes(b"")
    assert store.next_batch == 12
    store.close()


async def test_known_tools_grow_and_never_shrink(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC, tools=("terminal", "old"))
    await append_all(store, [kept(tasks(ABC)[0], tools=("terminal", "old"))])
    store.close()
    store = open_store(tmp_path, ABC, tools=("new", "terminal"), resume=True)
    assert store.manifest.known_tools == ["terminal", "old", "new"]
    await append_all(store, [kept(tasks(ABC)[1], 1, tools=("terminal", "old", "new"), calls=[("new", True)])])
    store.finalize()
    store.close()
    rows = merged(tmp_path)
    assert [list(row["tool_stats"]) for row in rows] == [["terminal", "old", "new"]] * 2


# What is owed, for any history: the counting of copies against a count done independently.


def slot_of(key: str, sample: int, state: str) -> Slot:
    return Slot(key, sample, state, {"kept": "completed", "failed": "model_error"}.get(state, "no_reasoning"), 1)


@settings(max_examples=200)
@given(
    before=st.lists(st.sampled_from("abc"), max_size=8),
    after=st.lists(st.sampled_from("abcd"), max_size=8),
    states=st.lists(st.sampled_from(["kept", "discarded", "failed", ""]), min_size=16, max_size=16),
    samples=st.integers(1, 2),
)
def test_k_finished_copies_finish_k_rows(before: list[str], after: list[str], states: list[str], samples: int) -> None:
    slots = []
    for task in tasks(before):
        for sample in range(samples):
            if state := states[(task.index * samples + sample) % 16]:
                slots.append(slot_of(task.key, sample, state))
    found = match(tasks(after), samples, slots)
    settled = Counter((s.key.partition("#")[0], s.sample) for s in slots if s.state != "failed")
    wanted = Counter((task.digest, sample) for task in tasks(after) for sample in range(samples))
    expected = {which: max(0, count - settled[which]) for which, count in wanted.items()}
    owed = Counter((o.task.digest, o.sample) for o in found.owed)
    assert {which: owed[which] for which in wanted} == expected
    assert found.completed + len(found.owed) == found.sessions == len(after) * samples
    assert [o.task.index for o in found.owed] == sorted(o.task.index for o in found.owed)
    # The numbers reconcile: what is on record and what is pending are what was asked, and what no one asks for.
    tried = {(s.key, s.sample) for s in slots}
    pending = sum(1 for o in found.owed if (o.task.key, o.sample) not in tried)
    assert len(slots) - merged_slots(slots, found.renamed) + pending == found.sessions + found.beyond


def merged_slots(slots: list[Slot], renamed: list[tuple[str, int, str]]) -> int:
    """How many slots less there are once the renamed ones have their new keys."""
    new = {(old, sample): key for old, sample, key in renamed}
    return len(slots) - len({(new.get((s.key, s.sample), s.key), s.sample) for s in slots})


async def test_a_finished_copy_takes_the_place_of_a_failed_one(tmp_path: Path) -> None:
    first, second = tasks(["a", "a"])
    store = open_store(tmp_path, ["a", "a"])
    await append_all(store, [failed(first), kept(second)])
    store.close()
    for _ in range(2):
        store = open_store(tmp_path, ["a"], resume=True)
        assert not store.owed((first,), 1).owed
        counts = store.finalize().statistics["reconcile"]
        store.close()
        assert (counts["sessions"], counts["kept"], counts["failed"], counts["no_longer_in_dataset"]) == (1, 1, 0, 0)
        Layout(tmp_path / "r").index.unlink()  # the new key is known without the cache too


async def test_the_document_names_every_file_and_field(tmp_path: Path) -> None:
    store = open_store(tmp_path, ABC)
    store.owed(tasks(ABC), 1)
    await append_all(store, [kept(tasks(ABC)[0]), failed(tasks(ABC)[1]), discarded(tasks(ABC)[2])])
    store.finalize()
    store.close()
    text = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    root = tmp_path / "r"
    for path in root.iterdir():
        assert f"`{path.name.replace('_0.', '_<N>.')}`" in text, path.name
    lines = [json.loads(line) for line in (root / "batch_0.jsonl").read_bytes().splitlines()]
    objects = [*lines, lines[0]["usage"], lines[0]["reasoning_stats"], lines[1]["error"], statistics(tmp_path)]
    objects += [statistics(tmp_path)["reconcile"], json.loads((root / "checkpoint.json").read_bytes())]
    manifest = json.loads((root / "run.json").read_bytes())
    objects += [manifest, manifest["dataset"], manifest["invocations"][0]]
    for found in objects:
        for key in found:
            assert f"`{key}`" in text or f'"{key}"' in text, key
    for key in lines[0]["metadata"]:
        assert f"`metadata.{key}`" in text, key
