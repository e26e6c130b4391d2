"""read_file, write_file and patch, in a real sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.tools import files
from support.toolboxes import Bench


async def put(tools: Bench, path: str, data: str | bytes) -> None:
    await tools.sandbox.write(path, data if isinstance(data, bytes) else data.encode())


async def got(tools: Bench, path: str) -> bytes:
    return await tools.sandbox.read(path, 1_000_000)


async def refusal(tools: Bench, name: str, **arguments: Any) -> str:
    result = await tools.result(name, arguments)
    assert not result.ok
    assert result.valid
    return result.error


# ---- read_file


async def test_a_page_of_numbered_lines(tools: Bench) -> None:
    await put(tools, "a.txt", "".join(f"line {n}\n" for n in range(1, 1201)))
    first = await tools.run("read_file", path="a.txt")
    assert first["content"].startswith("     1|line 1\n     2|line 2\n")
    assert first["content"].endswith("   500|line 500")
    assert (first["total_lines"], first["file_size"], first["truncated"]) == (1200, 10_893, True)
    assert first["hint"] == "Lines 1 to 500 of 1200; go on with offset=501."
    last = await tools.run("read_file", path="a.txt", offset=1199)
    assert last["content"] == "  1199|line 1199\n  1200|line 1200"
    assert last["truncated"] is False
    assert "past the end" in await refusal(tools, "read_file", path="a.txt", offset=1201)


@pytest.mark.parametrize(
    ("data", "content", "total"),
    [
        (b"", "", 0),
        (b"\n", "     1|", 1),
        (b"a", "     1|a", 1),
        (b"a\n\nb", "     1|a\n     2|\n     3|b", 3),
        (b"\xef\xbb\xbfa\n", "     1|a", 1),
        (b"a\r\nb\r\n", "     1|a\n     2|b", 2),
        (b"caf\xe9\n", "     1|caf\ufffd", 1),
    ],
)
async def test_odd_files_are_shown(tools: Bench, data: bytes, content: str, total: int) -> None:
    await put(tools, "odd", data)
    shown = await tools.run("read_file", path="odd")
    assert (shown["content"], shown["total_lines"], shown["file_size"]) == (content, total, len(data))
    assert shown.get("line_endings") == ("CRLF" if b"\r\n" in data else None)
    assert ("note" in shown) == (data in (b"", b"caf\xe9\n"))


async def test_long_lines_and_long_pages_are_bounded(tools: Bench) -> None:
    await put(tools, "wide", "x" * 50_000 + "\nshort\n")
    shown = await tools.run("read_file", path="wide")
    first, second = shown["content"].split("\n")
    assert len(first) <= files.LINE_LIMIT + 7
    assert first.endswith("… [line of 50,000 characters]")
    assert second == "     2|short"
    await put(tools, "long", ("y" * 1_000 + "\n") * 400)
    page = await tools.run("read_file", path="long")
    assert len(page["content"]) <= files.CONTENT_LIMIT
    assert page["truncated"] is True
    shown_lines = page["content"].count("\n") + 1
    assert page["hint"].endswith(f"offset={shown_lines + 1}.")


async def test_a_large_file_is_read_by_lines_inside(tools: Bench) -> None:
    await tools.shell("seq 1 200000 > big; printf 'no end' >> big")
    page = await tools.run("read_file", path="big", offset=150_000, limit=3)
    assert page["content"] == "150000|150000\n150001|150001\n150002|150002"
    assert (page["total_lines"], page["file_size"], page["truncated"]) == (200_001, 1_288_901, True)
    assert (await tools.run("read_file", path="big", offset=200_001))["content"] == "200001|no end"
    assert "past the end" in await refusal(tools, "read_file", path="big", offset=200_002)
    await tools.shell("printf x > wide; yes € | head -n 400000 | tr -d '\\n' >> wide")
    wide = await tools.run("read_file", path="wide")
    assert len(wide["content"]) < 3_000
    assert "note" not in wide
    assert wide["total_lines"] == 1


async def test_what_cannot_be_read_says_why(tools: Bench) -> None:
    await put(tools, "src/settings.py", "x")
    assert "Similar names there: src/settings.py." in await refusal(tools, "read_file", path="src/Setting.py")
    assert "its folder nowhere does not exist" in await refusal(tools, "read_file", path="nowhere/x")
    assert "is a folder" in await refusal(tools, "read_file", path="src")
    await tools.shell("printf 'ELF\\0x' > bin; mkfifo pipe")
    assert "binary file of 5 bytes" in await refusal(tools, "read_file", path="bin")
    assert "pipe" in await refusal(tools, "read_file", path="pipe")
    assert "path is empty" in await refusal(tools, "read_file", path=" ")


async def test_paths_follow_the_shell_and_home(tools: Bench) -> None:
    await tools.shell("mkdir -p 'a dir' && cd 'a dir' && echo here > \"it's\" && echo home > ~/h")
    assert (await tools.run("read_file", path="it's"))["content"] == "     1|here"
    assert (await tools.run("read_file", path="~/h"))["content"] == "     1|home"
    assert (await tools.run("write_file", path="~/sub/i", content="x"))["bytes_written"] == 1
    assert await tools.shell("cat ~/sub/i") == "x"


# ---- write_file


async def test_writing_makes_folders_keeps_modes_and_is_exact(tools: Bench) -> None:
    content = "é\r\n\0\u2028 no last newline"
    shown = await tools.run("write_file", path="new/deep/f", content=content)
    assert shown == {"bytes_written": len(content.encode()), "path": "new/deep/f"}
    assert await got(tools, "new/deep/f") == content.encode()
    await tools.shell("printf '#!/bin/sh\\n' > run.sh; chmod 755 run.sh")
    await tools.run("write_file", path="run.sh", content="#!/bin/sh\necho ok\n")
    assert await tools.shell("./run.sh") == "ok\n"
    assert "is a folder" in await refusal(tools, "write_file", path="new", content="x")
    assert await refusal(tools, "write_file", path="run.sh/x", content="x")


# ---- patch


async def test_replace_edits_one_place(tools: Bench) -> None:
    await put(tools, "a.py", "one\ntwo\nthree\n")
    shown = await tools.run("patch", path="a.py", old_string="two", new_string="2")
    assert shown == {
        "success": True,
        "diff": "--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three",
        "files_modified": ["a.py"],
    }
    assert await got(tools, "a.py") == b"one\n2\nthree\n"


async def test_replace_keeps_bytes_that_are_no_text(tools: Bench) -> None:
    await put(tools, "latin", b"caf\xe9 \x00 old\r\nend")
    shown = await tools.run("patch", path="latin", old_string="old\nend", new_string="new\nlast")
    assert shown["success"], shown
    assert await got(tools, "latin") == b"caf\xe9 \x00 new\r\nlast"


async def test_replace_that_cannot_be_made(tools: Bench) -> None:
    await put(tools, "a.py", "x = 1\nx = 1\n")
    assert "occurs 2 times (lines 1, 2)" in await refusal(
        tools, "patch", path="a.py", old_string="x = 1", new_string="y"
    )
    assert "nearest lines are" in await refusal(tools, "patch", path="a.py", old_string="x == 1", new_string="y")
    assert "missing: new_string" in await refusal(tools, "patch", path="a.py", old_string="x")
    assert "Similar names" in await refusal(tools, "patch", path="b.py", old_string="x", new_string="y")
    assert "needs the argument 'patch'" in await refusal(tools, "patch", mode="patch")
    assert await got(tools, "a.py") == b"x = 1\nx = 1\n"


PATCH = """*** Begin Patch
*** Update File: src/a.py
@@ def one():
-    return 1
+    return 11
*** Update File: old name.txt
*** Move to: moved/new name.txt
 keep
-drop
*** Add File: added/b.txt
+first
+second
*** Delete File: gone.txt
*** End Patch"""


async def prepare(tools: Bench) -> None:
    await put(tools, "src/a.py", "def one():\n    return 1\n")
    await put(tools, "old name.txt", "keep\ndrop\n")
    await put(tools, "gone.txt", "bye")
    await tools.shell("chmod 755 'old name.txt'")


async def test_a_patch_changes_several_files(tools: Bench) -> None:
    await prepare(tools)
    shown = await tools.run("patch", mode="patch", patch=PATCH)
    assert shown["success"], shown
    assert shown["files_modified"] == ["src/a.py", "moved/new name.txt"]
    assert (shown["files_created"], shown["files_deleted"]) == (["added/b.txt"], ["gone.txt"])
    assert "--- a/old name.txt\n+++ b/moved/new name.txt" in shown["diff"]
    listed = await tools.shell(
        "find . -type f | sort; stat -c %a 'moved/new name.txt'; cat added/b.txt 'moved/new name.txt'"
    )
    assert listed == "./added/b.txt\n./moved/new name.txt\n./src/a.py\n755\nfirst\nsecond\nkeep\n"
    assert await got(tools, "src/a.py") == b"def one():\n    return 11\n"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("printf 'keep\\nother\\n' > 'old name.txt'", "Hunk 1 was not found"),
        ("rm gone.txt", "There is no file gone.txt"),
        ("mkdir added && touch added/b.txt", "added/b.txt exists already"),
        ("mkdir moved && touch 'moved/new name.txt'", "moved/new name.txt exists already"),
        ("touch moved", "No file was changed."),
        ("touch added", "No file was changed. added/b.txt:"),
    ],
)
async def test_a_patch_that_fails_in_one_file_changes_none(tools: Bench, spoil: str, reason: str) -> None:
    await prepare(tools)
    await tools.shell(spoil)
    state = "find . -type f -exec stat -c '%n %a %s' {} + | sort; cat src/a.py; cat gone.txt 'old name.txt' 2>&1; true"
    before = await tools.shell(state)
    assert reason in await refusal(tools, "patch", patch=PATCH)
    assert await tools.shell(state) == before


async def test_calls_on_one_file_run_in_order(tools: Bench) -> None:
    results = await tools.all(
        ("write_file", {"path": "n", "content": "a"}),
        ("patch", {"path": f"{tools.sandbox.workspace}/n", "old_string": "a", "new_string": "ab"}),
        ("patch", {"path": "./n", "old_string": "ab", "new_string": "abc"}),
        ("terminal", {"command": "cat n"}),
        ("read_file", {"path": "n"}),
    )
    assert all(result.ok for result in results), results
    assert '"output":"abc"' in results[3].text
    assert '"     1|abc"' in results[4].text
