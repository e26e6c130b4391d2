"""Loader cases at the level of rows: a merged file of any size loads with one schema, whatever stands at its end.

A loader infers types from the first 10 MB, so each odd row stands behind more than that.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.json
import pytest

from gristmill.run.journal import Entry, append_group
from gristmill.run.layout import Layout
from gristmill.run.reader import RunReader
from gristmill.task import Task
from gristmill.trajectory import Row, RowCall, Turn, encode_row
from gristmill.types import Usage
from support.rundir import append_all, kept, open_store, row, statistics, tasks

COUNT = 5200  # rows of 2.2 kB before the odd ones: 11 MB
BLOCK = 10 << 20  # what `datasets` looks at
PROMPTS = [f"task {n}" for n in range(COUNT + 20)]
TASKS = tasks(PROMPTS)


def odd_rows() -> Iterator[tuple[str, Row]]:
    """One row of every kind that has broken a loader; each differs from the usual row in one way."""
    position = COUNT

    def make(**changes: Any) -> Row:
        nonlocal position
        task = TASKS[position]
        position += 1
        given = {name: changes.pop(name) for name in ("row_id", "extra") if name in changes}
        return row(msgspec.structs.replace(task, **given) if given else task, COUNT // 1000, **changes)

    yield "an unused tool is used", make(calls=[("process", False), ("write_file", True)])
    yield "parallel calls", make(calls=[("terminal", True)] * 3)
    yield "no reasoning", make(reasoning_stats=row(TASKS[0]).reasoning_stats.__class__(total_assistant_turns=2))
    yield "partial", make(outcome="output_truncated", calls=())
    yield "missing usage", make(usage=Usage(cost_known=False))
    yield "emoji and separators", make(text="\U0001f600 \u2028 \x85 \x00 \ufeff")
    yield "a lone surrogate", make(text="bad \ud83d half")
    yield "a reward", make(graded=True, reward=0.25)
    yield "a reward of an int", make(graded=True, reward=1)
    yield "row extras", make(extra='{"meta":{"k":[1,null]},"weight":0}')
    yield "a date for an id", make(row_id="2026-01-01")
    yield "text for an id", make(row_id="two")
    yield "a seed beyond 64 bits", huge_seed(make())
    yield "other toolsets", make(toolsets_used=["web"])
    yield "a made-up tool", make(calls=[("terminl", False), ("terminal", True)])
    yield "a long value", make(text="x" * 3_000_000)


def huge_seed(made: Row) -> Row:
    made.metadata.seed = 1180591620717411303424
    return made


ODD = list(odd_rows())


@pytest.fixture(scope="module")
def merged_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    layout = Layout(root / "r")
    open_store(root, PROMPTS, filters="none").close()
    usual = row(TASKS[0], text="y" * 900)
    entries = []
    for task in TASKS[:COUNT]:
        usual.prompt_index, usual.metadata.task_key = task.index, task.key
        usual.metadata.row_id = "1" if task.index % 2 else ""
        entries.append(Entry(task.index // 1000, encode_row(usual), b""))
    entries += [Entry(COUNT // 1000, encode_row(made), b"") for _, made in ODD]
    append_group(layout, entries)
    with RunReader(layout.root) as reader:
        assert reader.merge().rows == COUNT + len(ODD)
    assert layout.trajectories.stat().st_size > BLOCK + 3_000_000
    return layout.trajectories


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return ["list", *({json.dumps(shape(inner)) for inner in value})]
    return type(value).__name__


def test_every_row_has_the_same_keys_and_types(merged_file: Path) -> None:
    """EX-01 to EX-04, EX-07, EX-18: keys in one order, one type each, nothing null, no empty object."""
    turn = {"from": "str", "value": "str", "tool_calls": "list"}
    shapes = set()
    with merged_file.open("rb") as file:
        for line in file:
            assert b"null" not in line or b"[1,null]" in line
            data = json.loads(line)
            for spoken in data.pop("conversations"):
                assert {key: type(value).__name__ for key, value in spoken.items()} == turn
                assert all(
                    [*call] == ["id", "name", "arguments"] and all(isinstance(v, str) for v in call.values())
                    for call in spoken["tool_calls"]
                )
            assert data["tool_stats"] and data["metadata"] and data["toolsets_used"]
            shapes.add(json.dumps(shape(data)))
    assert len(shapes) == 1, shapes


def test_ex_03_04_05_06_07_18_a_file_of_any_size_loads_with_datasets(
    merged_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=str(merged_file), split="train", cache_dir=str(tmp_path))
    assert loaded.num_rows == COUNT + len(ODD)
    assert list(loaded.features) == list(Row.__struct_fields__)
    fields = loaded.features["metadata"]
    assert fields["timestamp"].dtype == "string" and fields["row_id"].dtype == "string"
    assert fields["seed"].dtype == "int64" and fields["row"].dtype == "string"
    assert loaded.features["usage"]["cost_usd"].dtype == loaded.features["reward"].dtype == "float64"
    odd = {name: loaded[COUNT + place] for place, (name, _) in enumerate(ODD)}
    assert odd["a lone surrogate"]["conversations"][-1]["value"].endswith("bad \ufffd half")
    assert odd["a reward"]["reward"] == 0.25 and odd["a reward of an int"]["reward"] == 1.0
    assert json.loads(odd["row extras"]["metadata"]["row"]) == {"meta": {"k": [1, None]}, "weight": 0}
    assert odd["an unused tool is used"]["tool_stats"]["process"]["count"] == 1
    assert odd["a made-up tool"]["conversations"][2]["tool_calls"][0]["name"] == "terminl"
    assert odd["emoji and separators"]["conversations"][-1]["value"].endswith("\U0001f600 \u2028 \x85 \x00 \ufeff")
    assert odd["a seed beyond 64 bits"]["metadata"]["seed"] == 2**63 - 1


@pytest.mark.parametrize("name", [name for name, _ in ODD])
def test_each_odd_row_has_the_arrow_type_of_the_first_ten_megabytes(merged_file: Path, name: str) -> None:
    """What `datasets` does, without it: the types of the first block are forced upon the later ones."""
    made = dict(ODD)[name]
    with merged_file.open("rb") as file:
        head = file.read(200_000)
    schema = pyarrow.json.read_json(io.BytesIO(head[: head.rindex(b"\n") + 1])).schema
    table = pyarrow.json.read_json(
        io.BytesIO(encode_row(made)),
        read_options=pyarrow.json.ReadOptions(block_size=16 << 20),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )
    assert table.schema == schema and table.num_rows == 1


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (b'"reward":0.0', b'"reward":null'),
        (b'"cost_usd":0.25', b'"cost_usd":"much"'),
        (b'"partial":false', b'"partial":"yes"'),
        (b'"seed":7', b'"seed":1180591620717411303424'),
        (b"done", b"\\ud83d"),
    ],
)
def test_the_check_above_can_fail(usual: bytes, odd: bytes) -> None:
    good = encode_row(row(TASKS[0]))
    schema = pyarrow.json.read_json(io.BytesIO(good)).schema
    bad = good.replace(usual, odd)
    assert bad != good
    try:
        found = pyarrow.json.read_json(io.BytesIO(bad)).schema
    except pa.ArrowInvalid:
        return
    assert found != schema


def test_ex_03_an_empty_list_first_and_a_value_later() -> None:
    """No column starts with what tells no type: the merge puts rows first that show it (tests/run/test_store_merge)."""
    first = encode_row(row(TASKS[0], calls=(), toolsets_used=[]))
    field = pyarrow.json.read_json(io.BytesIO(first)).schema.field("toolsets_used").type.value_type
    assert field == pa.null()  # which is why


def test_ex_05_times_stay_text() -> None:
    schema = pyarrow.json.read_json(io.BytesIO(encode_row(row(TASKS[0])))).schema
    assert schema.field("metadata").type.field("timestamp").type == pa.string()


def test_ex_06_no_lone_half_in_any_output_raw_or_escaped() -> None:
    task = Task(index=0, line=1, key="k", text="half \ud83d", row_id="\udc00", extra='{"a":"\ud800"}')
    made = row(task, text="\udfff")
    made.conversations.append(
        Turn(speaker="gpt", value="", tool_calls=[RowCall(id="\ud800", name="\ud800", arguments="\ud800")])
    )
    line = encode_row(made)
    line.decode("utf-8")
    assert b"\\ud" not in line.lower() and line.count("\ufffd".encode()) == 7


async def test_ex_09_one_bad_line_does_not_reach_the_merged_file(tmp_path: Path) -> None:
    good = kept(TASKS[0]).row
    layout = Layout(tmp_path / "r")
    layout.root.mkdir()
    layout.batch(0).write_bytes(b'{"p":"ok"}\n\x00\x00\x00\x00\n' + good + b'{"p":"ok"}\n{"p":"half')
    store = open_store(tmp_path, PROMPTS[:1], resume=True)
    report = store.finalize()
    store.close()
    assert layout.trajectories.read_bytes() == good
    assert [(fault.file, fault.line) for fault in report.unreadable] == [("batch_0.jsonl", n) for n in (1, 2, 4)]
    assert pyarrow.json.read_json(layout.trajectories).num_rows == 1


async def test_ex_20_a_made_up_tool_does_not_remove_the_row_silently(tmp_path: Path) -> None:
    calls = [("terminl", False), ("terminal", True)]
    store = open_store(tmp_path, ["a"])
    store.owed(tasks(["a"]), 1)
    await append_all(store, [kept(tasks(["a"])[0], calls=calls)])
    report = store.finalize()
    store.close()
    assert report.filtered == {"unknown_tool": 1}
    counts = statistics(tmp_path)["reconcile"]
    assert (counts["kept"], counts["filtered"], counts["pending"]) == (0, 1, 0)
    with RunReader(tmp_path / "r") as reader:
        reader.merge()  # without the filter it is there, its made-up call told apart
    found = statistics(tmp_path)
    assert found["reconcile"]["kept"] == 1 and found["unknown_tool_calls"] == {"terminl": 1}
    assert "terminl" not in found["tool_statistics"]


def test_ex_21_files_begin_without_a_mark_and_lines_end_with_one_byte(merged_file: Path) -> None:
    root = merged_file.parent
    for path in (merged_file, root / "run.json", root / "statistics.json", *root.glob("batch_*.jsonl")):
        data = path.read_bytes()
        assert not data.startswith(b"\xef\xbb\xbf") and b"\r" not in data and data.endswith(b"\n")
