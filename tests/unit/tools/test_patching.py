"""Edits of text: replacing, V4A patches, diffs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tools.diff import unified_diff
from gristmill.tools.patching import PatchError, apply_hunks, parse_patch, replace_text

SOURCE = "import os\n\n\ndef one():\n    return 1\n\n\ndef two():\n    return 2\n"


def patched(content: str, body: str) -> str:
    (change,) = parse_patch(f"*** Begin Patch\n*** Update File: a.py\n{body}\n*** End Patch")
    return apply_hunks(content, change.hunks)


def fault(content: str, body: str) -> str:
    with pytest.raises(PatchError) as caught:
        patched(content, body)
    return str(caught.value)


# ---- replace


def test_replace_needs_one_place() -> None:
    assert replace_text(SOURCE, "return 1", "return 10", replace_all=False) == SOURCE.replace("return 1", "return 10")
    with pytest.raises(PatchError, match=r"occurs 2 times \(lines 4, 8\)"):
        replace_text(SOURCE, "def ", "async def ", replace_all=False)
    assert replace_text(SOURCE, "def ", "async def ", replace_all=True).count("async def ") == 2


@pytest.mark.parametrize(("old", "new"), [("", "x"), ("return 1", "return 1")])
def test_replace_refuses_what_changes_nothing(old: str, new: str) -> None:
    with pytest.raises(PatchError):
        replace_text(SOURCE, old, new, replace_all=False)


def test_what_is_not_found_is_answered_with_what_is_near() -> None:
    with pytest.raises(PatchError, match="differ from it only in blanks") as caught:
        replace_text(SOURCE, "def one():\n  return 1", "x", replace_all=False)
    assert "     4|def one():" in str(caught.value)
    with pytest.raises(PatchError, match="nearest lines are") as caught:
        replace_text(SOURCE, "def two(x):\n    return 2", "x", replace_all=False)
    assert "     8|def two():" in str(caught.value)
    with pytest.raises(PatchError, match="Nothing like its first line"):
        replace_text(SOURCE, "zebra crossing", "x", replace_all=False)
    with pytest.raises(PatchError, match="not found"):
        replace_text("", "zebra", "x", replace_all=False)


def test_crlf_and_a_missing_last_newline_stay() -> None:
    assert replace_text("a\r\nb\r\nc", "a\nb", "x\ny\nz", replace_all=False) == "x\r\ny\r\nz\r\nc"
    assert replace_text("a\r\nb\nc", "b\nc", "d\n", replace_all=False) == "a\r\nd\n"  # mixed: exactly as it is
    assert patched("a\r\nb\r\n", " a\n-b\n+c\n+d") == "a\r\nc\r\nd\r\n"
    assert patched("a\nb", "-b\n+c") == "a\nc"


# ---- V4A


def test_hunks_are_found_by_their_lines() -> None:
    assert patched(SOURCE, " def two():\n-    return 2\n+    return 22") == SOURCE.replace("return 2", "return 22")
    assert patched(SOURCE, "@@ def one():\n-    return 1\n+    return 11") == SOURCE.replace("return 1", "return 11")
    assert patched(SOURCE, "@@ -4,2 +4,2 @@\n def one():\n-    return 1\n+    return 11\n").count("11") == 1
    two = "@@\n-import os\n+import sys\n@@\n-    return 2\n+    return 3"
    assert patched(SOURCE, two) == SOURCE.replace("os", "sys").replace("return 2", "return 3")


def test_hunks_may_come_out_of_order_and_may_only_add() -> None:
    body = "@@\n-    return 2\n+    return 3\n@@\n-import os\n+import sys"
    assert patched(SOURCE, body) == SOURCE.replace("os", "sys").replace("return 2", "return 3")
    assert patched("a\n", "+b") == "a\nb\n"
    assert patched("a", "+b") == "a\nb"
    assert patched("", "+b") == "b\n"
    assert patched(SOURCE, "@@ def one():\n+    # here").splitlines()[3:5] == ["def one():", "    # here"]
    assert patched("a\nb\n", "@@ a\n+1\n@@ a\n+2") == "a\n1\n2\nb\n"


def test_anchors_narrow_the_place() -> None:
    content = "class A:\n    def f(self):\n        pass\nclass B:\n    def f(self):\n        pass\n"
    body = "@@ class B:\n@@     def f(self):\n-        pass\n+        return 1"
    assert patched(content, body) == content[:-13] + "        return 1\n"
    assert "no line 'class C:'" in fault(content, "@@ class C:\n-        pass\n+        return 1")


def test_blanks_are_forgiven_where_the_place_is_certain() -> None:
    assert patched("if x:\n\ta = 1   \n", "-\ta = 1\n+\ta = 2") == "if x:\n\ta = 2\n"
    content = "class A:\n    def f(self):\n        return 1\n"
    body = " def f(self):\n-    return 1\n+    if x:\n+        return 2"
    assert patched(content, body) == "class A:\n    def f(self):\n        if x:\n            return 2\n"
    assert patched("  a\n  b\n", " a\n-b\n+c") == "  a\n  c\n"


def test_what_is_not_certain_is_refused() -> None:
    assert "fits in 2 places (lines 1, 3)" in fault("a\nb\na\nb\n", " a\n-b\n+c")
    assert "not found" in fault(SOURCE, "-    return 7\n+    return 8")
    assert "below the line 'def two():'" in fault(SOURCE, "@@ def two():\n-    return 1\n+    return 8")
    assert "earlier hunk" in fault("a\nb\n", "@@\n-a\n+x\n@@\n-a\n+y")


def test_end_of_file_picks_the_last_place() -> None:
    assert patched("a\nb\na\n", "-a\n+c\n*** End of File") == "a\nb\nc\n"
    assert "not found" in fault("a\nb\n", "-a\n+c\n*** End of File")


def test_empty_lines_without_their_blank_are_context() -> None:
    assert patched("a\n\nb\n", " a\n\n-b\n+c\n") == "a\n\nc\n"


def test_a_patch_names_its_files() -> None:
    changes = parse_patch(
        "*** Begin Patch\n*** Add File: new.txt\n+one\n+\n+two\n\n*** Update File: a\n*** Move to: b\n@@\n-x\n+y\n"
        "*** Delete File: c\n*** End Patch\nand some words after it"
    )
    assert [(c.action, c.path, c.move_to) for c in changes] == [
        ("add", "new.txt", ""),
        ("update", "a", "b"),
        ("delete", "c", ""),
    ]
    assert changes[0].content == "one\n\ntwo\n"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("", "names no file"),
        ("*** Begin Patch\n*** End Patch", "names no file"),
        ("hello", "Line 1 of the patch comes before"),
        ("*** Update File: a\nhello", "Line 2 of the patch must start with"),
        ("*** Update File: a", "changes nothing"),
        ("*** Update File:\n-a", "names no path"),
        ("*** Rename File: a", "no known directive"),
        ("*** Move to: b", "no known directive"),
        ("*** Add File: a\nx", "every line of an added file"),
        ("*** Add File: a\n+x\n\n+y", "Line 3 of the patch"),
        ("*** Delete File: a\n-x", "nothing follows"),
        ("*** Update File: a\n-x\n+y\n*** Delete File: a", "names 'a' twice"),
    ],
)
def test_a_bad_patch_is_refused_with_its_line(patch: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        parse_patch(patch)


lines = st.lists(st.sampled_from(["a", "b", "  a", "", "x = 1"]), max_size=12)


@given(lines, lines, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_patch_made_from_two_texts_turns_one_into_the_other(
    before: list[str], after: list[str], first_newline: bool, crlf: bool
) -> None:
    """The whole old text as removed lines, the whole new one as added: certain, whatever the texts are."""
    if not before or before[-1] == "" or (after and after[-1] == ""):
        return
    has_line_end = len(before) > 1 or first_newline
    end = "\r\n" if crlf and has_line_end else "\n"
    old = end.join(before) + (end if first_newline else "")
    body = "\n".join(["@@", *("-" + line for line in before), *("+" + line for line in after)])
    wanted = end.join([*after, ""] if first_newline else after)
    assert patched(old, body) == wanted


# ---- diff


@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
@given(
    st.lists(st.sampled_from("abcdef"), max_size=40), st.lists(st.sampled_from("abcdef"), max_size=40), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_the_program_patch_understands_the_diff(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], after: list[str], newline: bool
) -> None:
    old = "\n".join(before) + ("\n" if before else "")
    new = "\n".join(after) + ("\n" if newline and after else "")
    if old == new or not old or not new:
        return
    _check(tmp_path_factory.mktemp("diff"), old, new)


def _check(folder: Path, old: str, new: str) -> None:
    file = folder / "f"
    file.write_text(old)
    diff = unified_diff(old, new, "f")
    subprocess.run(["patch", "-s", "-p1"], input=diff + "\n", text=True, cwd=folder, check=True, timeout=20)
    assert file.read_text() == new


@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
def test_a_diff_of_long_texts_is_quick_and_valid(tmp_path: Path) -> None:
    old = [f"line {number % 7}" for number in range(20_000)]
    new = [f"line {number % 11}" for number in range(20_000)]
    _check(tmp_path, "\n".join(["a", *old, "z", ""]), "\n".join(["a", *new, "z", ""]))
    new = [*old[:9_000], "inserted", *old[9_000:]]
    _check(tmp_path, "\n".join([*old, ""]), "\n".join([*new, ""]))


def test_diffs_of_made_and_removed_files() -> None:
    assert unified_diff(None, "a\nb\n", "new") == "--- /dev/null\n+++ b/new\n@@ -0,0 +1,2 @@\n+a\n+b"
    assert unified_diff("a", None, "/old") == (
        "--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n\\ No newline at end of file"
    )
    assert unified_diff("a\n", "a\n", "old", "new") == "--- a/old\n+++ b/new"
