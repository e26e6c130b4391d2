"""The index is only a cache: whatever happens to it, what it says is what the batch files hold."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import StoreError
from gristmill.run.index import Index
from gristmill.run.journal import Entry, append_group
from gristmill.run.layout import Layout
from gristmill.task import text_digest
from support.rundir import discarded, failed, kept, tasks

TASKS = tasks([f"task {n}" for n in range(12)])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "r")
    made.root.mkdir()
    return made


def write(layout: Layout, *sessions: Any) -> None:
    append_group(layout, [Entry(s.batch, s.row, s.record) for s in sessions])


def contents(index: Index) -> list[Any]:
    return [
        (line.batch, line.offset, line.length, line.columns > 0, line.counts, line.summary) for line in index.lines()
    ]


def fresh(layout: Layout) -> list[Any]:
    """What an index says that is built from nothing."""
    copy = Layout(layout.root.with_name("fresh"))
    shutil.rmtree(copy.root, ignore_errors=True)
    copy.root.mkdir()
    for path in layout.root.glob("batch_*"):
        shutil.copy(path, copy.root)
    index = Index(copy)
    try:
        return contents(index)
    finally:
        index.close()


def test_it_follows_the_files(layout: Layout) -> None:
    write(layout, kept(TASKS[0]), failed(TASKS[1], 10), kept(TASKS[2], 2))
    index = Index(layout)
    assert [line.batch for line in index.lines()] == [0, 2, 10]  # by number, not by name
    write(layout, kept(TASKS[1], 2), discarded(TASKS[3], 0))
    index.refresh()
    assert contents(index) == fresh(layout)
    assert [line.counts for line in index.lines()] == [True, True, True, True, False]
    index.close()


def test_what_the_owner_adds_equals_what_is_read(layout: Layout) -> None:
    index = Index(layout)
    for number in range(6):
        group = [kept(TASKS[2 * number], number // 2), failed(TASKS[2 * number + 1], 5)]
        index.add(append_group(layout, [Entry(s.batch, s.row, s.record) for s in group]))
    assert contents(index) == fresh(layout) and len(contents(index)) == 12
    index.close()


def test_two_processes_may_bring_it_up_to_date(layout: Layout) -> None:
    owner, reader = Index(layout), Index(layout)
    landed = append_group(layout, [Entry(s.batch, s.row, s.record) for s in (kept(TASKS[0]), kept(TASKS[1]))])
    reader.refresh()  # the reader is first
    owner.add(landed)
    owner.add(append_group(layout, [Entry(0, kept(TASKS[2]).row, b"")]))
    assert contents(owner) == contents(reader) == fresh(layout)
    owner.close()
    reader.close()


def test_a_group_that_the_index_missed_is_read_from_the_file(layout: Layout) -> None:
    index = Index(layout)
    write(layout, kept(TASKS[0]))  # not told
    index.add(append_group(layout, [Entry(0, kept(TASKS[1]).row, b"")]))
    assert contents(index) == fresh(layout) and len(contents(index)) == 2
    index.close()


def spoil(name: str) -> Callable[[Layout], None]:
    def overwrite(layout: Layout) -> None:
        layout.index.write_bytes(b"not a database, and long enough to be taken for one" * 100)

    def cut(layout: Layout) -> None:
        os.truncate(layout.index, layout.index.stat().st_size // 2)

    def flip(layout: Layout) -> None:
        data = bytearray(layout.index.read_bytes())
        data[4096:] = os.urandom(len(data) - 4096)
        layout.index.write_bytes(data)

    def foreign(layout: Layout) -> None:
        layout.index.unlink()
        with sqlite3.connect(layout.index) as database:
            database.execute("CREATE TABLE lines(x)")
            database.execute("CREATE TABLE home(inode)")
            database.execute("PRAGMA user_version=1")
        database.close()

    def older(layout: Layout) -> None:
        with sqlite3.connect(layout.index) as database:
            database.execute("PRAGMA user_version=0")
        database.close()

    def directory(layout: Layout) -> None:
        layout.index.unlink()
        layout.index.mkdir()

    def gone(layout: Layout) -> None:
        layout.index.unlink()

    found: Callable[[Layout], None] = locals()[name]
    return found


@pytest.mark.parametrize("name", ["overwrite", "cut", "flip", "foreign", "older", "directory", "gone"])
def test_a_spoiled_index_is_made_anew(layout: Layout, name: str) -> None:
    write(layout, *(kept(task, task.index // 4) for task in TASKS))
    Index(layout).close()
    spoil(name)(layout)
    index = Index(layout)
    assert contents(index) == fresh(layout) and len(contents(index)) == 12
    index.close()


@pytest.mark.parametrize("change", ["same size", "grown in the middle", "shorter", "gone", "copied"])
def test_changed_files_are_read_again(layout: Layout, change: str) -> None:
    write(layout, *(kept(task, task.index // 4, text="done") for task in TASKS))
    Index(layout).close()
    path = layout.batch(1)
    data = path.read_bytes()
    if change == "same size":
        path.write_bytes(data.replace(b'"outcome":"completed"', b'"outcome":"changed.."'))
    elif change == "grown in the middle":
        path.write_bytes(data.replace(b"</think>\\ndone", b"</think>\\nmuch more", 1))
    elif change == "shorter":
        path.write_bytes(data[: data.index(b"\n") + 1])
    elif change == "gone":
        path.unlink()
    else:
        copy = layout.root.with_name("copy")
        shutil.copytree(layout.root, copy)  # with all times, as a backup makes it
        layout = Layout(copy)
        layout.batch(0).write_bytes(b"")
    index = Index(layout)
    assert contents(index) == fresh(layout)
    index.close()


def test_only_complete_lines_are_indexed(layout: Layout) -> None:
    write(layout, kept(TASKS[0]))
    with layout.batch(0).open("ab") as file:
        file.write(kept(TASKS[1]).row[:-5])
    index = Index(layout)
    assert len(contents(index)) == 1 and index.torn() == [0]
    with layout.batch(0).open("ab") as file:
        file.write(kept(TASKS[1]).row[-5:])
    index.refresh()
    assert len(contents(index)) == 2 and index.torn() == []
    index.close()


def test_damaged_lines_are_reported_with_their_place(layout: Layout) -> None:
    good = kept(TASKS[0]).row
    layout.batch(3).write_bytes(b"\n" + good + b'{"p":"ok"}\n\x00\x00\n  \n' + good)
    index = Index(layout)
    assert [(d.file, d.line) for d in index.damage()] == [("batch_3.jsonl", 3), ("batch_3.jsonl", 4)]
    assert "neither a trajectory" in index.damage()[0].reason and "not JSON" in index.damage()[1].reason
    assert len(contents(index)) == 2
    index.close()


def test_rows_in_any_other_form_are_told_from_our_own(layout: Layout) -> None:
    own = kept(TASKS[0]).row
    others = [
        own.replace(b'"cost_usd":0.25', b'"cost_usd":0'),  # a number that a loader takes for another type
        own.replace(b'"prompt_index":0,', b'"prompt_index": 0,'),
        own.replace(b'"completed":true,', b'"completed":true,"completed":true,'),
        own.replace(b',"graded":false', b""),
        own.replace(b'"row_id":""', b'"row_id":null'),
    ]
    layout.batch(0).write_bytes(own + b"".join(others))
    index = Index(layout)
    assert [line.columns > 0 for line in index.lines()] == [True] + [False] * 5
    index.close()


def test_lines_without_a_key_go_by_their_text(layout: Layout) -> None:
    reference = b'{"prompt_index":0,"conversations":[{"from":"human","value":"task 0"}],"completed":true}\n'
    old_discard = b'{"prompt_index":1,"discarded":"no_reasoning","prompt":"task 1"}\n'
    layout.batch(0).write_bytes(reference * 2 + old_discard)
    index = Index(layout)
    slots = list(index.slots())
    assert len(slots) == 3
    assert sorted(slot.key.partition("#")[0] for slot in slots) == sorted(
        ["text:" + text_digest("task 0")] * 2 + ["text:" + text_digest("task 1")]
    )
    index.close()


def test_damage_that_shows_late_is_an_error_with_its_mend(layout: Layout) -> None:
    write(layout, *(kept(task, task.index // 4) for task in TASKS))
    index = Index(layout)
    index._database.execute("DROP TABLE lines")
    with pytest.raises(StoreError, match="delete it"):
        list(index.slots())
    index.close()


def test_renaming_follows_chains(layout: Layout) -> None:
    write(layout, kept(TASKS[0]), kept(TASKS[1]), kept(TASKS[2]))
    index = Index(layout)
    a, b, c = (task.key for task in TASKS[:3])
    index.rename([(a, 0, b), (b, 0, c)])
    assert [(slot.key, slot.attempts) for slot in index.slots()] == [(c, 3)]
    index.close()
