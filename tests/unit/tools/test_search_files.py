"""search_files: the same results with ripgrep, with grep, and with BusyBox alone."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.sandbox.host import HostSandboxes
from support.toolboxes import Bench, bench

TREE = r"""
mkdir -p 'src/deep dir' .git .hidden empty
printf 'alpha needle\nbeta\nneedle gamma\n' > src/a.py
printf 'one\ntwo\nthree needle\nfour\nfive\n' > 'src/deep dir/b:12:x.ts'
printf 'Needle\r\nneedle(x)\r\n' > src/c.txt
printf 'needle in git\n' > .git/config
printf 'needle hidden\n' > .hidden/d.py
printf 'bin\0needle\n' > bin.dat
printf 'caf\351 needle\n' > latin.txt
printf 'n\303\251edle\n' > utf8.txt
printf 'needle without end' > noend.txt
ln -s src link
"""
ENGINES = {
    "ripgrep": "true",
    "grep": "mkdir ~/bin && for p in find xargs sort tr cut sed head uniq wc grep; do ln -s $(type -P $p) ~/bin; done; "
    "export PATH=~/bin",
    "busybox": "mkdir ~/bin && for p in $(busybox --list); do ln -sf $(type -P busybox) ~/bin/$p; done; "
    "export PATH=~/bin",
}


@pytest_asyncio.fixture(params=ENGINES, scope="module", loop_scope="module")
async def tree(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if shutil.which({"ripgrep": "rg"}.get(request.param, request.param)) is None:
        pytest.skip(f"{request.param} is not installed")
    async with bench() as made:
        await made.shell(TREE)
        await made.shell(ENGINES[request.param])
        yield made


in_tree = pytest.mark.asyncio(loop_scope="module")  # one sandbox for each engine, only looked at


def places(shown: dict[str, Any]) -> list[tuple[str, int]]:
    return [(match["path"], match["line"]) for match in shown["matches"]]


ALL = [
    (".hidden/d.py", 1),
    ("latin.txt", 1),
    ("noend.txt", 1),
    ("src/a.py", 1),
    ("src/a.py", 3),
    ("src/c.txt", 2),
    ("src/deep dir/b:12:x.ts", 3),
]


@in_tree
async def test_lines(tree: Bench) -> None:
    shown = await tree.run("search_files", pattern="needle")
    assert places(shown) == ALL
    assert (shown["total_count"], shown["truncated"]) == (7, False)
    lines = {match["path"]: match["content"] for match in shown["matches"]}
    assert lines["latin.txt"] == "caf\ufffd needle"
    assert lines["src/c.txt"] == "needle(x)"
    assert lines["src/deep dir/b:12:x.ts"] == "three needle"


@in_tree
async def test_pages(tree: Bench) -> None:
    shown = await tree.run("search_files", pattern="needle", limit=2, offset=1)
    assert places(shown) == ALL[1:3]
    assert (shown["total_count"], shown["truncated"]) == (7, True)
    assert shown["hint"] == "2 of 7 from offset 1; go on with offset=3."
    last = await tree.run("search_files", pattern="needle", offset=6)
    assert places(last) == ALL[6:]
    assert last["truncated"] is False
    beyond = await tree.run("search_files", pattern="needle", offset=99)
    assert (beyond["matches"], beyond["total_count"], beyond["truncated"]) == ([], 7, False)


@in_tree
async def test_files_and_counts(tree: Bench) -> None:
    names = [".hidden/d.py", "latin.txt", "noend.txt", "src/a.py", "src/c.txt", "src/deep dir/b:12:x.ts"]
    only = await tree.run("search_files", pattern="needle", output_mode="files_only")
    assert only == {"total_count": 6, "files": names, "truncated": False}
    counts = await tree.run("search_files", pattern="needle", output_mode="count", limit=5)
    assert counts["counts"] == dict(zip(names[:5], [1, 1, 1, 2, 1], strict=True))
    assert (counts["total_count"], counts["truncated"]) == (6, True)


@in_tree
async def test_context(tree: Bench) -> None:
    shown = await tree.run("search_files", pattern="needle", path="src", context=1, offset=1)
    assert places(shown) == ALL[4:]
    assert shown["total_count"] == 4
    assert shown["matches"][0] == {
        "path": "src/a.py",
        "line": 3,
        "content": "needle gamma",
        "before": ["beta"],
        "after": [],
    }
    assert (shown["matches"][2]["before"], shown["matches"][2]["after"]) == (["two"], ["four"])


@in_tree
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"pattern": r"needle\("}, [("src/c.txt", 2)]),
        ({"pattern": r"(?i)^needle\b"}, [ALL[0], ALL[2], ALL[4], ("src/c.txt", 1), ALL[5]]),
        ({"pattern": "n.{2,3}dle$"}, [ALL[1], ("src/a.py", 1), ("src/deep dir/b:12:x.ts", 3), ("utf8.txt", 1)]),
        ({"pattern": "néedle"}, [("utf8.txt", 1)]),
        ({"pattern": "needle", "file_glob": "*.py"}, [ALL[0], ALL[3], ALL[4]]),
        ({"pattern": "needle", "file_glob": "*.{ts,txt}", "path": "src"}, ALL[5:]),
        ({"pattern": "needle", "file_glob": "src/*.py"}, ALL[3:5]),
        ({"pattern": "needle", "file_glob": "**/*.ts", "path": "./src/"}, [("src/deep dir/b:12:x.ts", 3)]),
        ({"pattern": "needle", "path": "src/a.py"}, ALL[3:5]),
        ({"pattern": "needle", "path": ".git"}, [(".git/config", 1)]),
        ({"pattern": "gamma", "path": "link"}, [("link/a.py", 3)]),
        ({"pattern": "-n"}, []),
        ({"pattern": "needle", "path": "empty"}, []),
    ],
)
async def test_what_is_found(tree: Bench, arguments: dict[str, Any], wanted: list[tuple[str, int]]) -> None:
    shown = await tree.run("search_files", **arguments)
    assert places(shown) == wanted


@in_tree
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"pattern": "*.py"}, [".hidden/d.py", "src/a.py"]),
        ({"pattern": "**/*.ts"}, ["src/deep dir/b:12:x.ts"]),
        ({"pattern": "src/*"}, ["src/a.py", "src/c.txt"]),
        ({"pattern": "*.{dat,ts}"}, ["bin.dat", "src/deep dir/b:12:x.ts"]),
        ({"pattern": "a.py"}, ["src/a.py"]),
        ({"pattern": "*.txt", "limit": 2}, ["latin.txt", "noend.txt"]),
        ({"pattern": "nothing"}, []),
    ],
)
async def test_files_by_name(tree: Bench, arguments: dict[str, Any], wanted: list[str]) -> None:
    shown = await tree.run("search_files", target="files", **arguments)
    assert shown["files"] == wanted
    assert shown["total_count"] == (4 if "limit" in arguments else len(wanted))


@in_tree
async def test_what_cannot_be_searched_says_why(tree: Bench) -> None:
    for arguments, reason in (
        ({"pattern": "needle", "path": "nowhere"}, "no such path: nowhere"),
        ({"pattern": "needle("}, "("),
        ({"pattern": "(?=x)"}, "Look-around"),
        ({"pattern": "[a"}, "without its ']'"),
    ):
        result = await tree.result("search_files", arguments)
        assert not result.ok
        assert reason in result.error


@in_tree
async def test_a_unicode_class_needs_ripgrep(tree: Bench) -> None:
    result = await tree.result("search_files", {"pattern": r"\p{Latin}\p{Ll}+ gamma"})
    assert result.ok == ('"line":3' in result.text)
    assert result.ok or "needs ripgrep" in result.error


@pytest.mark.parametrize("provider", [HostSandboxes, BubblewrapSandboxes])
async def test_a_large_result_stays_bounded(provider: Any) -> None:
    async with bench(provider=provider) as made:
        await made.shell("mkdir many; cd many; for n in $(seq 1 30); do seq -f 'needle %g' 1 5000 > f$n; done; cd ..")
        shown = await made.run("search_files", pattern="needle", limit=1000, offset=70_000)
        assert shown["total_count"] == 100_000
        assert len(shown["matches"]) == 1000
        assert shown["matches"][0] == {"path": "many/f22", "line": 1, "content": "needle 1"}
        await made.shell("for n in $(seq 1 300); do head -c 20000 /dev/zero | tr '\\0' x; echo; done > wide")
        wide = await made.run("search_files", pattern="x", limit=300)
        assert (wide["total_count"], wide["truncated"]) == (300, True)
        assert 100 < len(wide["matches"]) < 130
        assert all(len(match["content"]) <= 500 for match in wide["matches"])


async def test_the_shell_is_left_as_it_was(tools: Bench) -> None:
    await tools.shell("mkdir d; cd d; export LC_ALL=POSIX")
    await tools.run("search_files", pattern="x")
    assert await tools.shell("basename $PWD; echo $LC_ALL; type -t files; true") == "d\nPOSIX\n"
