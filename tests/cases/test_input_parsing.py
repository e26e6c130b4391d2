"""The bug cases of category *input parsing*, where the dataset is read."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.dataset import MAX_ROW_BYTES, read_tasks
from gristmill.errors import SetupError
from gristmill.task import Dataset, text_digest


def read(tmp_path: Path, content: bytes | str | list[str]) -> Dataset:
    if isinstance(content, list):
        content = "".join(line + "\n" for line in content)
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_tasks(str(path))


def refused(dataset: Dataset) -> dict[int, str]:
    return {row.line: row.reason for row in dataset.refused}


def texts(dataset: Dataset) -> list[str]:
    return [task.text for task in dataset.tasks]


def test_in_03_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    dataset = read(tmp_path, '{"prompt": "a"}\r\n\r\n   \r\n{"prompt": "b"}\r\n{"prompt": "c"} ')
    assert texts(dataset) == ["a", "b", "c"]
    assert [(task.index, task.line) for task in dataset.tasks] == [(0, 1), (1, 4), (2, 5)]
    assert dataset.refused == ()


def test_in_04_row_is_a_bare_string(tmp_path: Path) -> None:
    dataset = read(tmp_path, ['"This prompt is only a string. Context: {context}"', '{"prompt": "ok"}'])
    assert refused(dataset) == {1: "it is not an object but str"}
    assert [(task.index, task.text) for task in dataset.tasks] == [(1, "ok")]


def test_in_05_row_is_a_number_array_null_or_boolean(tmp_path: Path) -> None:
    dataset = read(tmp_path, ["5", '["prompt"]', "null", "true", '{"prompt": "ok"}'])
    assert refused(dataset) == {
        1: "it is not an object but int",
        2: "it is not an object but array",
        3: "it is not an object but null",
        4: "it is not an object but bool",
    }
    assert texts(dataset) == ["ok"]
    assert dataset.rows == 5


def test_in_07_prompt_is_not_a_string(tmp_path: Path) -> None:
    lines = [
        '{"prompt": 123}',
        '{"prompt": null}',
        '{"prompt": ["a"]}',
        '{"prompt": {"text": "a"}}',
        '{"prompt": [{"type": "text", "text": "a"}]}',
        '{"prompt": "ok"}',
    ]
    first, second = read(tmp_path, lines), read(tmp_path, lines)
    assert refused(first) == {
        1: "the prompt is a number; it must be text, content parts or chat messages",
        2: "the prompt is null; it must be text, content parts or chat messages",
        3: "part 1 of the prompt is text, not an object with a type",
        4: "the prompt is an object; it must be text, content parts or chat messages",
    }
    assert texts(first) == ["a", "ok"]
    assert first == second  # a resume reads it again, and comes to the same verdicts


def test_in_08_empty_or_blank_prompt(tmp_path: Path) -> None:
    dataset = read(tmp_path, ['{"prompt": ""}', r'{"prompt": "  \n"}', '{"prompt": "ok"}'])
    assert refused(dataset) == {1: "the prompt is empty", 2: "the prompt is empty"}
    assert texts(dataset) == ["ok"]


def test_in_09_lone_surrogate(tmp_path: Path) -> None:
    dataset = read(tmp_path, [r'{"prompt": "cut emoji \ud83d here", "note": "\ude00"}', '{"prompt": "ok"}'])
    task = dataset.tasks[0]
    assert task.text == "cut emoji \ufffd here"
    task.text.encode(), task.extra.encode()
    assert json.loads(task.extra) == {"note": "\ufffd"}
    after = read(tmp_path, ['{"prompt": "cut emoji \ufffd here"}']).tasks[0]
    assert task.key == after.key == text_digest("cut emoji \ud83d here")


def test_in_11_integer_with_thousands_of_digits(tmp_path: Path) -> None:
    dataset = read(tmp_path, ['{"prompt": "x", "id": ' + "9" * 5000 + "}", '{"prompt": "ok"}'])
    assert refused(dataset) == {1: "it holds a number of more than 300 digits"}
    assert texts(dataset) == ["ok"]


def test_in_12_deeply_nested_json(tmp_path: Path) -> None:
    nested = ["[" * depth + "]" * depth for depth in (199, 200, 100_000)]  # the row's own braces are a level too
    lines = [f'{{"prompt": "x", "extra": {value}}}' for value in nested]
    lines += ['{"prompt": "x", "extra": ' + "[" * 100_000, '{"prompt": "x", "extra": "' + "[" * 1000 + '"}']
    dataset = read(tmp_path, lines)
    assert refused(dataset) == dict.fromkeys((2, 3, 4), "it is nested deeper than 200 levels")
    assert [task.line for task in dataset.tasks] == [1, 5]


def test_in_15_one_row_of_tens_of_megabytes(tmp_path: Path) -> None:
    huge = '{"prompt": "' + "x" * 30_000_000 + '"}'
    dataset = read(tmp_path, ['{"prompt": "before"}', huge, '{"prompt": "ok"}'])
    assert refused(dataset) == {2: "it is longer than 16 MiB, the limit of one row"}
    assert [(task.line, task.text) for task in dataset.tasks] == [(1, "before"), (3, "ok")]
    largest = '{"prompt": "' + "x" * (MAX_ROW_BYTES - 15) + '"}'
    assert len(read(tmp_path, [largest]).tasks) == 1


def assert_kept_exactly(tmp_path: Path, *prompts: str) -> None:
    for ascii_only in (True, False):
        dataset = read(tmp_path, [json.dumps({"prompt": prompt}, ensure_ascii=ascii_only) for prompt in prompts])
        assert texts(dataset) == list(prompts)
        assert [task.key for task in dataset.tasks] == [text_digest(prompt) for prompt in prompts]
        assert all(task.history == () for task in dataset.tasks)


def test_in_16_template_syntax(tmp_path: Path) -> None:
    assert_kept_exactly(tmp_path, "Explain {{ user }}, {x}, %s, ${HOME} and {% raw %}")


def test_in_17_control_tags_and_tokenizer_specials(tmp_path: Path) -> None:
    assert_kept_exactly(tmp_path, "What do <|endoftext|>, <|im_end|>, </think>, <tool_call> and <TOOL>X</TOOL> mean?")


def test_in_20_slash_bang_and_at(tmp_path: Path) -> None:
    assert_kept_exactly(tmp_path, "@/etc/passwd summarise", "/clear now explain TCP", "!ls what does this do?")


def test_in_22_many_lines_shell_and_regex(tmp_path: Path) -> None:
    few_shot = "Q: 16*3 = <<16*3=48>>48\n#### 48\n\nQ: regex ^[a-z]+\\.[a-z]{2,}$ costs $5 `id` $(id)\nA:"
    controls = "    def f():\n\u2028\x85\x00\x1b[0m 日本語 😀\r\n"
    assert_kept_exactly(tmp_path, few_shot, "Какво можеш да правиш?", controls)


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", "\ufeff", "[\n"])
def test_in_18_empty_file_or_only_unusable_lines(tmp_path: Path, content: str) -> None:
    with pytest.raises(SetupError) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert "prompts.jsonl" in caught.value.message
    assert caught.value.mend
    assert caught.value.exit_status != 0


def test_in_19_ids_are_data(tmp_path: Path) -> None:
    ids = ["../../escape", "a/b:c*?", "CON"]
    dataset = read(tmp_path, [json.dumps({"id": name, "prompt": "x", "cwd": "../.."}) for name in ids])
    assert [task.row_id for task in dataset.tasks] == ids
    assert len({task.digest for task in dataset.tasks}) == 1  # an id is no part of what makes a task
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_in_21_file_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"not UTF-8.*byte offset 0\b.*UTF-16"):
        read(tmp_path, base64.b64decode("//57ACIAcAByAG8AbQBwAHQAIgA6ACAAIgBoAGkAIgB9AAoA"))
    with pytest.raises(SetupError, match=r"not UTF-8.*byte offset 15\b.*line 1"):
        read(tmp_path, base64.b64decode("eyJwcm9tcHQiOiAiY2Fm6SJ9Cg=="))
    with pytest.raises(SetupError, match=r"not UTF-8.*byte offset 31\b.*line 3"):
        read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt":"\xe9"}\n')


def test_in_21_the_locale_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "naïve 日本語 😀"}\n'.encode())
    code = f"from gristmill.dataset import read_tasks; print(read_tasks({str(path)!r}).tasks[0].key)"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": os.environ["PATH"], "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for locale in ("C", "C.UTF-8")
    }
    assert keys == {text_digest("naïve 日本語 😀")}
