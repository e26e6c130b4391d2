"""Whole runs with an MCP server of `--mcp_config`: its tools are offered, called, counted, and it ends with the run."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from support.runs import Place

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = str(Path(__file__).parents[1] / "unit/tools_mcp/server.py")
SECRET = f"tok-{uuid.uuid4().hex}"


def test_a_server_s_tools_are_called_and_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", SECRET)
    box = {
        "command": sys.executable,
        "args": [SERVER, "stdio"],
        "env": {"API_TOKEN": "${TEST_TOKEN}"},
        "tools": ["add", "fail", "environment", "terminal"],
    }
    (place.root / "servers.json").write_text(
        json.dumps({"mcpServers": {"box": box}, "allowedVariables": ["TEST_TOKEN"]})
    )
    script = [
        call("add", {"a": 20, "b": 22}, reasoning="one"),
        call("fail", {"message": "no luck"}, reasoning="two"),
        call("environment", {"name": "API_TOKEN"}, reasoning="three"),
        call("terminal", {"command": "echo built-in"}, reasoning="four"),
        call("box_terminal", {}, reasoning="five"),
        say("done", reasoning="six"),
    ]
    place.dataset(*({"prompt": f"task {n}", "toolsets": ["box", "terminal"]} for n in range(4)))
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, f"--mcp_config={place.root / 'servers.json'}")
    rows = place.merged()
    assert len(rows) == 4
    for row in rows:
        assert row["outcome"] == "completed" and row["toolsets_used"] == ["box", "terminal"]
        stats = row["tool_stats"]
        assert stats["add"] == stats["environment"] == {"count": 1, "success": 1, "failure": 0}
        assert stats["fail"] == {"count": 1, "success": 0, "failure": 1}
        assert stats["terminal"]["success"] == 1 and stats["box_terminal"]["success"] == 1
        results = [turn["value"] for turn in row["conversations"] if turn["from"] == "tool"]
        assert '"42"' in results[0] and "no luck" in results[1] and "API_TOKEN=***" in results[2]
        assert "built-in" in results[3] and "not the built-in one" in results[4]
    known = json.loads((place.directory / "run.json").read_text())["known_tools"]
    assert {"add", "fail", "environment", "box_terminal"} <= set(known)
    for path in place.directory.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path
    assert not [p for p in psutil.process_iter(["environ"]) if SECRET in (p.info["environ"] or {}).values()]


def test_a_server_that_does_not_start_is_an_error_before_the_run(place: Place) -> None:
    servers = {"box": {"command": sys.executable, "args": [SERVER, "broken"]}}
    (place.root / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    place.dataset({"prompt": "task", "toolsets": ["box"]})
    with ScriptedEndpoint([say("done")]).in_thread() as endpoint:
        printed = place.run(endpoint.url, f"--mcp_config={place.root / 'servers.json'}", status=1)
        assert "no licence found" in printed and endpoint.count == 0
