"""What a machine lacks is told before the run, all at once and with the mend; or left out, where the user says so."""

from __future__ import annotations

import json
import sys

import pytest

from gristmill.cli.main import main
from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from support.runs import Place
from support.services import MCP_SERVER

pytest.importorskip("PIL", reason="the extra vision is not installed")
pytest.importorskip("playwright", reason="the extra browser is not installed")
pytest.importorskip("trafilatura", reason="the extra web is not installed")

Capture = pytest.CaptureFixture[str]
REMOTE = "https://openrouter.ai/api/v1"


@pytest.fixture
def place(place: Place, bare: pytest.MonkeyPatch) -> Place:
    """Without a key, a Chromium, or a provider whose name is known."""
    bare.setenv("BROWSER_EXECUTABLE", str(place.root / "no-chromium"))
    bare.setenv("WEB_PROVIDER", "brave")
    bare.chdir(place.root)
    place.dataset("one")
    return place


def refused(capsys: Capture, place: Place, url: str, *flags: str) -> list[str]:
    command = place.command(url, *flags)
    assert main(command[command.index("run") :]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not (place.root / "data").exists(), "nothing is printed, nothing made"
    return captured.err.splitlines()


@pytest.mark.parametrize("more", [(), ("--dry_run",)])
def test_a_newcomer_reads_all_that_is_missing_at_once(
    capsys: Capture, place: Place, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """`default` without a key, a sandbox, a browser: one line each, with what to do about it."""
    monkeypatch.setenv("PATH", str(place.root))
    monkeypatch.setenv("HOME", str(place.root))
    monkeypatch.setattr(sys, "prefix", str(place.root))
    for name in ("WEB_PROVIDER", "BROWSER_EXECUTABLE"):
        monkeypatch.delenv(name)
    lines = refused(capsys, place, REMOTE, "--distribution=default", *more)
    assert lines[0] == "❌ Fatal error: This run cannot start here: 4 things are missing."
    assert lines[1] == "   - No API key for openrouter.ai. Set OPENROUTER_API_KEY or give --api_key."
    assert lines[2].startswith("   - ") and "apt install bubblewrap" in lines[2]
    assert lines[3].startswith("   - Toolset image_gen: ") and "FAL_KEY" in lines[3] and "IMAGE_BASE_URL" in lines[3]
    assert lines[4].startswith("   - Toolset browser: no Chromium is installed: apt-get install chromium")
    assert "--skip_unavailable_toolsets" in lines[5] and "gristmill doctor" in lines[5]
    assert len(lines) == 6 and max(map(len, lines)) < 200


def test_one_thing_that_is_missing_is_one_line(capsys: Capture, place: Place) -> None:
    (line,) = refused(capsys, place, REMOTE)
    assert line == "❌ Fatal error: No API key for openrouter.ai. Set OPENROUTER_API_KEY or give --api_key."
    (line,) = refused(capsys, place, "http://127.0.0.1:9/v1", "--distribution=minimal")
    assert "Toolset web: The search provider brave needs BRAVE_API_KEY." in line
    (line,) = refused(capsys, place, "http://127.0.0.1:9/v1", "--distribution=minimal", "--skip_unavailable_toolsets")
    assert "needs BRAVE_API_KEY." in line and "To do without" not in line  # without it there is no toolset left


def test_services_that_are_half_set_up_are_told(capsys: Capture, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISION_BASE_URL", "https://vision.example.org/v1")
    monkeypatch.setenv("VISION_MODEL", "seer")
    monkeypatch.setenv("IMAGE_BASE_URL", REMOTE)
    lines = refused(capsys, place, "http://127.0.0.1:9/v1", "--distribution=creative")
    assert "   - Toolset vision: Looking at pictures at vision.example.org needs VISION_API_KEY." in lines
    assert "   - Toolset image_gen: Drawing pictures with IMAGE_BASE_URL needs IMAGE_MODEL too." in lines
    (line,) = refused(capsys, place, REMOTE, "--distribution=terminal_only")  # needs neither
    assert "OPENROUTER_API_KEY" in line


def servers(place: Place) -> str:
    box = {"command": sys.executable, "args": [MCP_SERVER, "stdio"], "tools": ["add"]}
    shut = {"command": "sh", "args": ["-c", "echo no licence found >&2; exit 1"]}
    (place.root / "servers.json").write_text(json.dumps({"mcpServers": {"box": box, "shut": shut}}))
    return "--mcp_config=servers.json"


def test_what_is_left_out_is_told_and_no_row_lists_it(place: Place) -> None:
    """--skip_unavailable_toolsets: rows have what was offered; MCP servers that do not start are left out too."""
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    place.dataset(
        "drawn", {"prompt": "exact", "toolsets": ["browser", "file"]}, {"prompt": "bare", "toolsets": ["web"]}
    )
    flags = ("--distribution=default", "--num_workers=1", "--skip_unavailable_toolsets", "--filters=none")
    with ScriptedEndpoint([call("browser_back", reasoning="r"), say("ok")]).in_thread() as endpoint:
        planned = place.run(endpoint.url, *flags, "--dry_run")
        assert "   Toolsets: vision, terminal, file\n" in planned and endpoint.count == 0
        printed = place.run(endpoint.url, *flags, servers(place))
        tools = {seen.body["messages"][1]["content"]: seen.body.get("tools", []) for seen in endpoint.requests}
    lacking = {"web": "BRAVE_API_KEY", "image_gen": "FAL_KEY", "browser": "no-chromium"}
    for text, missing in ((planned, lacking), (printed, {**lacking, "shut": "no licence found"})):
        told = [line for line in text.splitlines() if line.startswith("⚠️  Left out: ")]
        assert len(told) == len(missing)
        for name, why in missing.items():
            assert any(line.startswith(f"⚠️  Left out: {name} (") and why in line for line in told)
        assert "⚠️  Prompts whose toolsets are all left out, and which run without tools: 1." in text
    rows = {row["conversations"][1]["value"]: row for row in place.merged()}
    assert {prompt: row["toolsets_used"] for prompt, row in rows.items()} == {
        "drawn": ["vision", "terminal", "file", "box"],
        "exact": ["file"],
        "bare": [],
    }
    names = {prompt: [tool["function"]["name"] for tool in offered] for prompt, offered in tools.items()}
    assert names["drawn"][0] == "vision_analyze" and names["drawn"][-1] == "add" and len(names["drawn"]) == 8
    assert names["exact"] == ["read_file", "write_file", "patch", "search_files"] and names["bare"] == []
    for row in rows.values():
        assert row["outcome"] == "completed" and row["tool_stats"]["browser_back"]["failure"] == 1


def doctor(capsys: Capture, *flags: str) -> dict[tuple[str, str], tuple[bool | None, str]]:
    assert main(["doctor", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    return {(one["group"], one["name"]): (one["ok"], one["detail"]) for one in found}


def test_doctor_says_what_each_toolset_lacks(capsys: Capture, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    found = doctor(capsys, servers(place))
    assert found["toolsets", "web"] == found["toolsets", "search"]
    assert found["toolsets", "web"] == (False, "The search provider brave needs BRAVE_API_KEY.")
    assert found["toolsets", "vision"][0] and "the run's own model" in found["toolsets", "vision"][1]
    assert found["toolsets", "image_gen"][0] is False and "FAL_KEY" in found["toolsets", "image_gen"][1]
    assert found["toolsets", "browser"][0] is False and "no-chromium" in found["toolsets", "browser"][1]
    assert found["toolsets", "terminal"] == found["toolsets", "file"] == (True, "works")
    assert found["toolsets", "box"] == (True, "works: add")
    assert found["toolsets", "shut"][0] is False and "no licence found" in found["toolsets", "shut"][1]
    assert found["distributions", "can run"] == (True, "terminal_only")

    keys = {"OPENROUTER_API_KEY": "canary-1", "BRAVE_API_KEY": "canary-2", "VISION_API_KEY": "canary-3"}
    services = {"VISION_BASE_URL": "https://vision.example.org/v1", "VISION_MODEL": "seer"}
    drawing = {"IMAGE_BASE_URL": REMOTE, "IMAGE_MODEL": "some/painter", "BROWSER_EXECUTABLE": sys.executable}
    for name, value in (keys | services | drawing).items():
        monkeypatch.setenv(name, value)
    found = doctor(capsys)
    assert found["toolsets", "web"] == (True, "works: searches with brave")
    assert found["toolsets", "vision"] == (True, "works: seer at vision.example.org")
    assert found["toolsets", "image_gen"] == (True, "works: some/painter at openrouter.ai")
    assert found["toolsets", "browser"] == (True, f"works: {sys.executable}")
    assert len(found["distributions", "can run"][1].split(", ")) == 17
    assert main(["doctor"]) == 0
    assert "canary" not in capsys.readouterr().out
