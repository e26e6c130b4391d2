"""Reading a dataset: fields, prompt shapes, keys, copies, limits, and whatever bytes a file may hold."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataset import read_tasks
from gristmill.errors import SetupError
from gristmill.task import Dataset, Task, task_digest, text_digest
from gristmill.types import Message

DOCS = Path(__file__).parents[2] / "docs" / "dataset.md"
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def read(*rows: Any, prompt_field: str = "prompt", max_samples: int | None = None) -> Dataset:
    """Read rows given as Python values, or as bytes where the exact form matters."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_bytes(b"\n".join(lines))
        return read_tasks(str(path), prompt_field=prompt_field, max_samples=max_samples)


def task(row: Any, **options: Any) -> Task:
    dataset = read(row, **options)
    assert dataset.refused == ()
    return dataset.tasks[0]


def refusal(row: Any, **options: Any) -> str:
    """The reason why a row is refused, read beside one that is not."""
    dataset = read(row, {"prompt": "ok", options.get("prompt_field", "prompt"): "ok"}, **options)
    assert [item.text for item in dataset.tasks] == ["ok"]
    return dataset.refused[0].reason


# Fields


def test_every_field_is_read() -> None:
    row = {
        "prompt": "go",
        "id": "r1",
        "image": "debian:12",
        "cwd": "/app",
        "toolsets": ["terminal", "file"],
        "system": "Be brief.",
        "files": {"src/a.py": "print()\n", "empty.txt": ""},
        "setup": "true",
        "followups": ["and now?", "more"],
        "verify": "test -f a",
        "level": 3,
    }
    got = task(row)
    expected = Task(
        index=0,
        line=1,
        key=got.key,
        text="go",
        row_id="r1",
        image="debian:12",
        cwd="/app",
        toolsets=("terminal", "file"),
        system="Be brief.",
        files={"src/a.py": "print()\n", "empty.txt": ""},
        setup="true",
        followups=("and now?", "more"),
        verify="test -f a",
        extra='{"level":3}',
    )
    assert got == expected
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=Task) == got


def test_fields_that_a_loader_filled_with_null_count_as_not_set() -> None:
    names = ("id", "image", "docker_image", "cwd", "toolsets", "system", "files", "setup", "followups", "verify")
    assert task({"prompt": "go", **dict.fromkeys(names)}) == task({"prompt": "go"})
    texts = ("image", "docker_image", "cwd", "toolsets", "system", "setup", "verify")
    assert task({"prompt": "go", **dict.fromkeys(texts, ""), "files": {"a": None}, "followups": []}).key == text_digest(
        "go"
    )


def test_docker_image_is_the_image_unless_there_is_one() -> None:
    assert task({"prompt": "go", "docker_image": "a"}) == task({"prompt": "go", "image": "a"})
    both = task({"prompt": "go", "image": "a", "docker_image": "b"})
    assert (both.image, both.extra) == ("a", '{"docker_image":"b"}')


def test_toolsets_as_text_as_list_and_none_at_all() -> None:
    assert task({"prompt": "go", "toolsets": " web, file,web "}).toolsets == ("web", "file")
    assert task({"prompt": "go", "toolsets": "web,file"}).key == task({"prompt": "go", "toolsets": ["web", "file"]}).key
    assert task({"prompt": "go", "toolsets": []}).toolsets == ()
    assert task({"prompt": "go"}).toolsets is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x", "x"),
        (7, "7"),
        (1.5, "1.5"),
        (True, "true"),
        ([1, "a"], '[1,"a"]'),
        ({"a": None}, '{"a":null}'),
        (None, ""),
    ],
)
def test_id_becomes_text(value: Any, expected: str) -> None:
    assert task({"prompt": "go", "id": value}).row_id == expected


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("image", 5, "'image' is a number; it must be text"),
        ("docker_image", ["a"], "'image' is a list; it must be text"),
        ("cwd", False, "'cwd' is true or false; it must be text"),
        ("cwd", "a\0b", "'cwd' contains a NUL character"),
        ("system", {}, "'system' is an object; it must be text"),
        ("setup", ["ls"], "'setup' is a list; it must be text"),
        ("verify", 1.5, "'verify' is a number; it must be text"),
        ("toolsets", {"web": 1}, "'toolsets' is an object; it must be a list of names"),
        ("toolsets", ["web", 3], "'toolsets' holds a number; it must be a list of names"),
        ("toolsets", "web,,file", "'toolsets' holds an empty name"),
        ("toolsets", ["web", " "], "'toolsets' holds an empty name"),
        ("followups", "and?", "'followups' is text; it must be a list of text"),
        ("followups", ["a", None], "'followups' holds null; it must be a list of text"),
        ("followups", ["a", " \n"], "'followups' holds an empty prompt"),
        ("files", ["a"], "'files' is a list; it must be an object of paths and texts"),
        ("files", {"a": 1}, "'files' holds a number for 'a'; it must be text"),
    ],
)
def test_a_field_of_the_wrong_type_refuses_the_row_and_names_it(field: str, value: Any, reason: str) -> None:
    assert refusal({"prompt": "go", field: value}) == reason


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a/..", "dir/", "a\0b"])
def test_files_stay_inside_the_workspace(path: str) -> None:
    assert refusal({"prompt": "go", "files": {path: "x"}}).startswith(f"'files' holds the path {path!r}; it must be")


# Prompts


def test_content_parts() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": None}, "text": None}
    got = task(
        {"prompt": [{"type": "text", "text": "Look:"}, picture, {"type": "image_url", "image_url": "http://x/y"}]}
    )
    assert got.text == "Look:\n[image]\n[image]"
    assert got.history == (
        Message(
            role="user",
            content=[
                {"type": "text", "text": "Look:"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                {"type": "image_url", "image_url": {"url": "http://x/y"}},
            ],
        ),
    )


def test_chat_messages() -> None:
    messages = [
        {"role": "system", "content": "Be brief.", "tool_calls": None},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
    ]
    got = task({"prompt": messages})
    assert got.text == "and now?"
    assert got.history == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="hi", name="ann"),
        Message(role="assistant", content="hello"),
        Message(role="user", content=[{"type": "text", "text": "and now?"}]),
    )


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "the prompt is an empty list; it must be text, content parts or chat messages"),
        ([{"type": "text"}], "part 1 of the prompt has no text"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "part 2 of the prompt is of type 'input_audio'"),
        ([{"type": "image_url", "image_url": {}}], "part 1 of the prompt has no image_url with a url"),
        ([{"type": "text", "text": " "}], "the prompt is empty"),
        ([{"role": "user", "content": ""}], "the prompt is empty"),
        ([{"role": "user", "content": None}], "the content of message 1 of the prompt is null, not text"),
        ([{"role": "user", "content": []}], "the content of message 1 of the prompt is a list, not text"),
        ([{"role": "robot", "content": "a"}], "message 1 of the prompt is of role 'robot'"),
        ([{"role": ["user"], "content": "a"}], "message 1 of the prompt is of role ['user']"),
        ([{"role": "assistant", "content": "a"}], "the last message of the prompt is of role 'assistant'; it must be"),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
            "a system message of the prompt stands behind other messages",
        ),
        ([{"role": "user", "content": "a", "name": 1}], "the name of message 1 of the prompt is a number, not text"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "user", "content": "b"}],
            "message 1 of the prompt has 'tool_calls'; a message holds role, content and name",
        ),
        ([{"role": "user", "content": "a"}, "b"], "part 1 of the prompt is of type None"),
    ],
)
def test_prompts_that_have_no_known_shape(prompt: Any, reason: str) -> None:
    assert refusal({"prompt": prompt}).startswith(reason)


def test_prompt_field_names_another_key() -> None:
    row = {"question": "why?", "prompt": "left alone", "n": 1}
    got = task(row, prompt_field="question")
    assert (got.text, got.extra) == ("why?", '{"prompt":"left alone","n":1}')
    assert got.key == text_digest("why?")


def test_prompt_field_may_lead_into_a_row() -> None:
    row = {"data": {"turns": [{"content": "hi"}]}, "a.b": "plain key"}
    got = task(row, prompt_field="data.turns.0.content")
    assert got.text == "hi"
    assert json.loads(got.extra) == row
    assert task(row, prompt_field="a.b").text == "plain key"
    assert "has no 'data.turns.7'" in refusal(row, prompt_field="data.turns.7")


def test_a_missing_prompt_says_which_keys_there_are_and_how_to_map_them() -> None:
    reason = refusal({"question": "why?", "answer": "so"})
    assert reason == (
        "it has no 'prompt'; its keys are question, answer. "
        "If another key holds the prompt, name it: --prompt_field question"
    )
    assert "it has no keys" in refusal({})
    with pytest.raises(SetupError) as caught:
        read({"question": "why?"}, {"question": "how?", "answer\n": "so"})
    assert "all 2 refused" in caught.value.message
    assert caught.value.message.endswith(r"Keys seen: question, 'answer\n'.")
    assert caught.value.mend.endswith("--prompt_field question.")


# Values that are carried through


def test_carried_values_keep_their_exact_digits() -> None:
    line = b'{"prompt": "go", "big": 123456789012345678901234567890, "f": 2.50,  "l": [1 , {"a":  "b  c"}], "e": 1E5}'
    assert task(line).extra == '{"big":123456789012345678901234567890,"f":2.50,"l":[1,{"a":"b  c"}],"e":1E5}'


def test_nan_and_infinity_become_null_outside_of_text() -> None:
    got = task({"prompt": "NaN", "a": math.nan, "b": [math.inf, -math.inf, "-Infinity"], "c": 'say \\"NaN'})
    assert got.text == "NaN"
    assert json.loads(got.extra) == {"a": None, "b": [None, None, "-Infinity"], "c": 'say \\"NaN'}


def test_long_numbers_are_refused_wherever_they_are_but_not_in_text() -> None:
    digits = "7" * 301
    reason = "it holds a number of more than 300 digits"
    assert refusal(b'{"prompt": "go", "a": [{"b": %s}]}' % digits.encode()) == reason
    assert refusal(b'{"prompt": "go", "a": 0.%s}' % digits.encode()) == reason
    assert "out of range" in refusal(b'{"prompt": %s}' % (b"7" * 5000))
    assert task({"prompt": "go", "a": digits}).extra == f'{{"a":"{digits}"}}'


def test_duplicate_keys_the_last_one_wins() -> None:
    got = task(b'{"prompt": "a", "x": 1, "prompt": "b", "x": 2}')
    assert (got.text, got.extra) == ("b", '{"x":2}')


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ud83d\ude00", "😀"),
        (rb"\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\uDBFF\u0041", "\ufffdA"),
        (rb"\"NaN\" \udc00", '"NaN" \ufffd'),
    ],
)
def test_lone_surrogates(written: bytes, meant: str) -> None:
    assert task(b'{"prompt": "%s", "%s": 1}' % (written, written)).text == meant


# Keys


def test_the_key_is_the_content_and_nothing_else() -> None:
    base = {"prompt": "go", "cwd": "/a", "files": {"x": "1", "y": "2"}}
    same = {"note": 1, "files": {"y": "2", "x": "1"}, "id": 9, "cwd": "/a", "prompt": "go"}
    assert task(base).key == task(same).key
    assert len(task(base).key) == 32
    changes: list[dict[str, Any]] = [
        {"prompt": "go "},
        {"prompt": [{"type": "text", "text": "go"}]},
        {"image": "debian"},
        {"cwd": "/b"},
        {"toolsets": ["web"]},
        {"toolsets": []},
        {"system": "s"},
        {"files": {"x": "1", "y": "3"}},
        {"setup": "true"},
        {"followups": ["?"]},
        {"verify": "true"},
    ]
    assert len({task(base | change).key for change in changes} | {task(base).key}) == len(changes) + 1


def test_keys_are_fixed_for_ever() -> None:
    """A run of today is resumed by the gristmill of next year, so these may never change."""
    assert task({"prompt": "List the files"}).key == "dd8046163b17f29438d80b27726a31d6"
    assert task({"prompt": "naïve 😀\n", "cwd": "/a", "toolsets": ["file"]}).key == "a5d70ed1d1eb1bb055a03bc78bd1dc0a"


def test_copies_are_numbered_in_file_order() -> None:
    dataset = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "id": 1}, {"prompt": "a"})
    key = text_digest("a")
    assert [item.key for item in dataset.tasks] == [key, text_digest("b"), f"{key}#2", f"{key}#3"]
    assert {item.digest for item in dataset.tasks} == {key, text_digest("b")}


def test_task_digest_takes_the_order_of_keys_for_nothing() -> None:
    assert task_digest({"prompt": "a", "cwd": "b"}) == task_digest({"cwd": "b", "prompt": "a"})


# Files


def test_max_samples_counts_rows_and_not_blank_lines() -> None:
    rows = (b"", {"prompt": "a"}, b" ", b"broken", {"prompt": "b"}, b"\xff never looked at")
    dataset = read(*rows, max_samples=3)
    assert [(item.index, item.line) for item in dataset.tasks] == [(0, 2), (2, 5)]
    assert [(item.index, item.line) for item in dataset.refused] == [(1, 4)]
    assert dataset.rows == 3
    with pytest.raises(SetupError, match="byte offset"):
        read(*rows)


def test_the_digest_is_of_the_whole_file() -> None:
    whole = read({"prompt": "a"}, {"prompt": "b"})
    assert read({"prompt": "a"}, {"prompt": "b"}, max_samples=1).digest == whole.digest
    assert read({"prompt": "a"}, {"prompt": "c"}).digest != whole.digest


def test_byte_order_marks_at_the_start_and_where_files_were_joined() -> None:
    dataset = read(b'\xef\xbb\xbf{"prompt": "a"}', b'\xef\xbb\xbf{"prompt": "b"}')
    assert [item.text for item in dataset.tasks] == ["a", "b"]


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match="Cannot read the dataset"):
        read_tasks(str(tmp_path / name))


@settings(deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: not text.isspace()), min_size=1))
def test_any_prompt_comes_back_as_it_was(prompts: list[str]) -> None:
    dataset = read(*({"prompt": prompt, "n": prompt} for prompt in prompts))
    assert [item.text for item in dataset.tasks] == prompts
    assert [json.loads(item.extra) for item in dataset.tasks] == [{"n": prompt} for prompt in prompts]
    assert [item.digest for item in dataset.tasks] == [text_digest(prompt) for prompt in prompts]
    assert len({item.key for item in dataset.tasks}) == len(prompts)


@settings(deadline=None)
@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([b"[", b'{"prompt": {', rb'{"prompt":"\ud8', b"{NaN", b"\xef\xbb"])
    )
)
def test_no_bytes_stop_the_reading_or_lose_a_row(lines: list[bytes]) -> None:
    content = b"\n".join([b'{"prompt": "first"}', *lines, b'{"prompt": "last"}'])
    try:
        content.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(SetupError, match=rf"byte offset {error.start}\b"):
            read(content)
        return
    dataset = read(content)
    assert [item.text for item in dataset.tasks][:: max(1, len(dataset.tasks) - 1)] == ["first", "last"]
    blank = [line for line in content.split(b"\n") if not line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert dataset.rows == content.count(b"\n") + 1 - len(blank)


def test_reading_is_fast(tmp_path: Path) -> None:
    """Ten times under the aim of 100,000 rows a second, so that a busy machine does not fail it."""
    path = tmp_path / "many.jsonl"
    rows = 20_000
    path.write_text("".join(f'{{"prompt": "List the files, please, number {i}", "id": {i}}}\n' for i in range(rows)))
    start = time.process_time()
    assert len(read_tasks(str(path)).tasks) == rows
    assert rows / (time.process_time() - start) > 10_000


# What is shown to users


def test_the_examples_are_a_dozen_usable_rows() -> None:
    dataset = read_tasks(str(EXAMPLES))
    assert dataset.refused == ()
    assert len(dataset.tasks) == 12
    assert len({item.digest for item in dataset.tasks}) == 12


def test_the_rows_in_the_docs_are_usable() -> None:
    blocks = DOCS.read_text(encoding="utf-8").split("```jsonl\n")[1:]
    rows = [line.encode() for block in blocks for line in block.split("```")[0].splitlines()]
    dataset = read(*rows)
    assert dataset.refused == ()
    assert len(dataset.tasks) == 7


def test_the_code_in_the_docs_runs() -> None:
    for block in DOCS.read_text(encoding="utf-8").split("```python\n")[1:]:
        exec(block.split("```")[0], {})
