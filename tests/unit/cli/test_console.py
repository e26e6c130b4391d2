"""Lines on every kind of console."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from gristmill.cli.console import Lines


def written(text: str, encoding: str) -> bytes:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    Lines(stream).write(text)
    return raw.getvalue()


@given(st.text(), st.sampled_from(["utf-8", "ascii", "latin-1", "cp1252", "cp932"]))
def test_writing_never_raises_and_is_one_line_for_one(text: str, encoding: str) -> None:
    out = written(text, encoding).decode(encoding)
    assert out.count("\n") == text.count("\n") + 1


def test_signs_become_words_where_they_cannot_be_shown() -> None:
    assert written("✅ Prompt 1 completed", "ascii") == b"[ok] Prompt 1 completed\n"
    assert written("⚠️  日本", "ascii") == b"[warning]  ??\n"
    assert written("é → x", "latin-1") == "é -> x\n".encode("latin-1")


def test_control_characters_are_shown_not_obeyed() -> None:
    assert written("a\x1b[2Jb\rc\x00d\u202ee\ud800", "utf-8").decode() == "a\\x1b[2Jb\\rc\\x00d e\ufffd\n"


def test_a_reader_that_leaves_does_not_end_the_work() -> None:
    program = (
        "import sys\nfrom gristmill.cli.console import Lines\nlines = Lines(sys.stdout)\n"
        "for i in range(20000): lines.write('x' * 100)\nsys.exit(7 if lines.closed else 8)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 7
    assert process.stderr.read() == b""
    process.stderr.close()


def test_lines_are_flushed_one_by_one() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream, os.fdopen(reader, "rb", buffering=0) as end:
        Lines(stream).write("first")
        assert end.read(100) == b"first\n"
