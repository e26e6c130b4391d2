"""Toolsets of one's own in whole runs: in distributions and rows, as single tools, and in runs resumed without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.cli.main import main
from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from gristmill.tools.builtin import TOOL_TO_TOOLSET_MAP
from support.runs import Place
from support.services import MCP_SERVER

pytest.importorskip("mcp", reason="the extra mcp is not installed")

OWN = """
[plain]
toolsets = { terminal = 100 }

[mixed]
toolsets = { weather = 100, "tool:recall" = 100, "tool:read_file" = 100 }
"""
MEMORY = '''
from gristmill import tool

def remember(text: str) -> str:
    """Write down."""
    return text

@tool(toolset="functions")
def recall(about: str) -> str:
    """Read again."""
    return f"nothing about {about}"

def write_file(text: str) -> str:
    return text
'''


@pytest.fixture
def place(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    (place.root / "own.toml").write_text(OWN)
    (place.root / "memory.py").write_text(MEMORY)
    server = {"command": sys.executable, "args": [MCP_SERVER, "stdio"], "tools": ["add", "point"]}
    (place.root / "servers.json").write_text(json.dumps({"mcpServers": {"weather": server}}))
    monkeypatch.chdir(place.root)
    monkeypatch.syspath_prepend(str(place.root))
    return place


def offered(endpoint: ScriptedEndpoint) -> list[list[str]]:
    return [[tool["function"]["name"] for tool in seen.body["tools"]] for seen in endpoint.requests]


def test_a_run_with_other_tools_on_each_resume_keeps_one_schema(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In distributions a server is a toolset by its name, `tool:` one tool; the merged rows load with `datasets`."""
    plain = ("--distributions_file=own.toml", "--distribution=plain", "--num_workers=1")
    mixed = (plain[0], "--distribution=mixed", "--num_workers=1", "--mcp_config=servers.json")
    mixed += ("--tools=memory:recall,memory:remember", "--resume", "--allow_changes")

    place.dataset("one", "two")
    with ScriptedEndpoint([call("terminal", {"command": "true"}, reasoning="r"), say("ok")]).in_thread() as endpoint:
        place.run(endpoint.url, *plain)
    first = (place.directory / "batch_0.jsonl").read_bytes()
    place.dataset("one", "two", "three")
    script = [
        call("add", {"a": 1}, reasoning="r"),
        call("recall", {"about": "mills"}),
        call("read_file", {"path": "x"}),
        say("ok"),
    ]
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, *mixed)
        assert offered(endpoint) == [["read_file", "recall", "add", "point"]] * 4
    assert "Changed: distribution: plain → mixed" in printed and "Changed: mcp_config: none → servers.json" in printed
    place.dataset("one", "two", "three", "four")
    with ScriptedEndpoint([call("terminal", {"command": "true"}, reasoning="r"), say("ok")]).in_thread() as endpoint:
        place.run(endpoint.url, *plain, "--resume", "--allow_changes")

    known = json.loads((place.directory / "run.json").read_text())["known_tools"]
    assert known == [*TOOL_TO_TOOLSET_MAP, "add", "point", "recall", "remember"]
    assert (place.directory / "batch_0.jsonl").read_bytes() == first, "old files stay as they are"
    assert list(json.loads(first.splitlines()[0])["tool_stats"]) == list(TOOL_TO_TOOLSET_MAP)
    rows = sorted(place.merged(), key=lambda row: row["prompt_index"])
    assert [row["toolsets_used"] for row in rows] == [
        ["terminal"],
        ["terminal"],
        ["weather", "tool:recall", "tool:read_file"],
        ["terminal"],
    ]
    for row in rows:
        assert list(row["tool_stats"]) == list(row["tool_error_counts"]) == known
    assert rows[0]["tool_stats"]["add"] == {"count": 0, "success": 0, "failure": 0}
    assert rows[2]["tool_stats"]["add"] == rows[2]["tool_stats"]["recall"] == {"count": 1, "success": 1, "failure": 0}
    assert place.statistics()["tool_statistics"]["add"]["count"] == 1

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(
        "json", data_files=str(place.directory / "trajectories.jsonl"), split="train", cache_dir=str(tmp_path / "hf")
    )
    assert loaded.num_rows == 4 and list(loaded.features["tool_stats"]) == known


ERRORS: list[tuple[list[str], dict[str, Any], str]] = [
    (
        ["--distribution=typo"],
        {},
        "own.toml: distribution 'typo', toolsets: there is no tool 'recal'. Known",
    ),
    ([], {"toolsets": ["tool:recal"]}, "prompts.jsonl line 2: Unknown tool: recal. Known are web_search, "),
    ([], {"toolsets": ["wether"]}, "prompts.jsonl line 2: Unknown toolset: wether. Known are web, "),
    (["--tools=memory:write_file"], {}, "--tools memory:write_file: write_file is the name of a built-in tool."),
    (["--tools=memory:recall,memory:recall"], {}, "--tools memory:recall: there already is a tool recall."),
    (["--tools=memory:forget"], {}, "--tools memory:forget: memory:forget does not exist"),
    (["--tools=memory"], {}, "--tools memory is no module:name."),
    (["--tools=broken:x"], {}, "--tools broken:x cannot be imported: ZeroDivisionError: division by zero."),
    (["--tools=nowhere:x"], {}, "--tools nowhere:x: nowhere:x needs the library nowhere, which is not installed."),
]


@pytest.mark.parametrize(("flags", "row", "words"), ERRORS, ids=lambda value: str(value)[:40])
def test_what_does_not_exist_is_told_with_its_place(
    place: Place, capsys: pytest.CaptureFixture[str], flags: list[str], row: dict[str, Any], words: str
) -> None:
    own = place.root / "own.toml"
    own.write_text(OWN + '[typo]\ntoolsets = { "tool:recal" = 100 }\n')
    (place.root / "broken.py").write_text("1 / 0\n")
    place.dataset("fine", {"prompt": "odd", **row})
    command = place.command("http://127.0.0.1:9/v1", f"--distributions_file={own}", *flags)
    assert main(command[command.index("run") :]) in (1, 2)
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
    assert not (place.root / "data").exists()
