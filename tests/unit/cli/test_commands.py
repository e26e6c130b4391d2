"""The commands as a shell sees them: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill import __version__
from gristmill.cli.main import main
from gristmill.testing.endpoint import ScriptedEndpoint, call, fail, say
from support.runs import Place

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.dataset("one", "two")
    return place


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    script = [call("terminal", {"command": "true"}, reasoning="first"), say("done", reasoning="second")]
    with ScriptedEndpoint(script).in_thread() as running:
        yield running


def flags(place: Place, url: str, *more: str) -> list[str]:
    command = place.command(url, "--num_workers=1", *more)
    return command[command.index("run") :]


def printed(capsys: Capture, *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    captured = capsys.readouterr()
    return captured.out if not status else captured.err


def document(capsys: Capture, *argv: str) -> Any:
    return json.loads(printed(capsys, *argv, "--json"))


def test_version_and_help(capsys: Capture) -> None:
    assert printed(capsys, "--version") == f"gristmill {__version__}\n"
    for command in ("run", "status", "merge", "distributions", "doctor", "clean"):
        assert printed(capsys, command, "--help").startswith(f"Usage: gristmill {command}")
    assert "--max_turns N" in printed(capsys, "run", "-h")


def test_without_a_command_the_help_is_the_answer(capsys: Capture) -> None:
    assert main([]) == 2
    assert "Usage: gristmill" in capsys.readouterr().out


def test_a_command_or_flag_that_does_not_exist(capsys: Capture) -> None:
    assert "Did you mean" in printed(capsys, "statu", status=2)
    assert "Unknown flag: --outputdir. Did you mean --output_dir?" in printed(
        capsys, "status", "r", "--outputdir=x", status=2
    )
    assert "--run_name needs a value" in printed(capsys, "run", "--run_name", "--resume", status=2)
    assert "--resume is a switch" in printed(capsys, "run", "--resume=maybe", status=2)


def test_distributions(capsys: Capture, tmp_path: Path) -> None:
    assert "Scientific research" in printed(capsys, "distributions")
    assert len(document(capsys, "distributions")) == 17
    drawn = document(capsys, "distributions", "science", "--draws=2000")
    assert set(drawn["drawn"]) == set(drawn["exact"]) and abs(drawn["drawn"]["browser"] - 50) < 5
    text = printed(capsys, "distributions", "science", "--draws", "100")
    assert "drawn  exact" in text and "94.00" in text
    assert "Unknown distribution: nope" in printed(capsys, "distributions", "nope", status=2)
    assert "--draws must be a whole number" in printed(capsys, "distributions", "science", "--draws=0", status=2)
    own = tmp_path / "own.toml"
    own.write_text('[mine]\ndescription = "d"\ntoolsets = {terminal = 50, web = 5}\n')
    assert document(capsys, "distributions", f"--distributions_file={own}")["mine"]["toolsets"]["web"] == 5


def test_doctor_says_what_is_and_what_is_not(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-value")
    monkeypatch.delenv("GROQ_API_KEY", raising=False)
    found = {(f["group"], f["name"]): f for f in document(capsys, "doctor")}
    assert found["sandboxes", "host"]["ok"] and found["gristmill", "version"]["detail"] == __version__
    assert found["models", "api.openai.com"] == {
        "group": "models",
        "name": "api.openai.com",
        "ok": True,
        "detail": "key is set",
    }
    assert found["models", "api.groq.com"]["detail"] == "no key: set GROQ_API_KEY"
    text = printed(capsys, "doctor")
    assert "✅ host: works" in text and "sk-secret-value" not in text


def test_clean_removes_only_what_is_left_over(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, other = tmp_path / f"gristmill-{os.getuid()}-left", tmp_path / "gristmill-notes"
    for path in (left, other):
        (path / "s-1").mkdir(parents=True)
    # Memory of the machine is looked through too, where tests that kill workers may have left something meanwhile.
    assert re.search(r"directories: [1-9][0-9]* removed", printed(capsys, "clean"))
    assert not left.exists() and other.exists()
    assert document(capsys, "clean")["removed"]["directories"] >= 0


def test_a_run_its_status_and_its_merge(capsys: Capture, place: Place, endpoint: ScriptedEndpoint) -> None:
    assert "BATCH PROCESSING COMPLETE: 2 of 2" in printed(capsys, *flags(place, endpoint.url, "--sandbox=host"))
    output = f"--output_dir={place.root / 'data'}"
    text = printed(capsys, "status", "r", output)
    assert "ended (finished)" in text and "2 = 2 kept" in text and "trajectories.jsonl" in text
    known = document(capsys, "status", str(place.directory))
    assert known["state"] == "ended (finished)" and known["statistics"]["reconcile"]["kept"] == 2
    before = (place.directory / "trajectories.jsonl").read_bytes()
    report = document(capsys, "merge", "r", output, "--filters=min_tool_calls=2")
    assert report["rows"] == 0 and report["filtered"] == {"min_tool_calls": 2}
    assert "0 of" not in printed(capsys, "merge", "r", output)
    assert (place.directory / "trajectories.jsonl").read_bytes() == before
    assert "Unknown filter" in printed(capsys, "merge", "r", output, "--filters=nope", status=2)
    assert "There is no run nope" in printed(capsys, "status", "nope", output, status=1)


def test_status_and_merge_understand_a_run_of_the_reference(capsys: Capture, tmp_path: Path) -> None:
    row = {
        "prompt_index": 0,
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "<think>\nt\n</think>\na"}],
        "metadata": {"batch_num": 0, "timestamp": "2026-01-01T00:00:00", "model": "m"},
        "completed": True,
        "partial": False,
        "api_calls": 1,
        "toolsets_used": ["terminal"],
        "tool_stats": {"terminal": {"count": 0, "success": 0, "failure": 0}},
        "tool_error_counts": {"terminal": 0},
    }
    directory = tmp_path / "old"
    directory.mkdir()
    (directory / "batch_0.jsonl").write_text(json.dumps(row) + "\n")
    known = document(capsys, "status", str(directory))
    assert known["made_by"] == "reference" and known["statistics"]["outcomes"] == {"completed": 1}
    assert document(capsys, "merge", str(directory))["rows"] == 1


def test_a_dry_run_checks_and_writes_nothing(capsys: Capture, place: Place, endpoint: ScriptedEndpoint) -> None:
    text = printed(capsys, *flags(place, endpoint.url, "--dry_run", "--max_turns=3", "--sandbox=host"))
    assert "Total batches: 1" in text and "Toolsets: terminal, file" in text and "Model calls at most: 6" in text
    assert "isolates nothing" in text  # the warning of a run is there too
    assert endpoint.count == 0 and not (place.root / "data").exists()
    assert "nope.jsonl" in printed(
        capsys, *flags(place, endpoint.url, "--dry_run", "--dataset_file=nope.jsonl"), status=1
    )


def test_failures_that_resume_would_retry_give_3(capsys: Capture, place: Place) -> None:
    script = {"one": [say("done", reasoning="r")], "two": [fail(400, '{"error": {"message": "no"}}')]}
    with ScriptedEndpoint(script).in_thread() as endpoint:
        assert main(flags(place, endpoint.url, "--sandbox=host")) == 3
        out = capsys.readouterr().out
        assert "❌ Prompt 1 failed:" in out and "(will retry on resume)" in out
        assert "2 = 1 kept + 0 discarded + 0 filtered + 1 failed + 0 pending" in out


def test_cl_03_nothing_worked_and_the_exit_status_says_so(capsys: Capture, place: Place) -> None:
    """CL-03: success, partial and total failure are told apart."""
    with ScriptedEndpoint([say("x")], api_key="right").in_thread() as endpoint:
        error = printed(capsys, *flags(place, endpoint.url, "--sandbox=host", "--api_key=wrong"), status=1)
    assert "401" in error and error.count("\n") == 1 and "wrong" not in error.replace("wrong key", "")
    with ScriptedEndpoint([fail(401, "no")]).in_thread() as endpoint:
        assert main(flags(place, endpoint.url, "--sandbox=host", "--run_name=later")) == 1
    captured = capsys.readouterr()
    assert "BATCH PROCESSING COMPLETE: 0 of 2" in captured.out and "❌ Fatal error:" in captured.err


def start_and_wait(place: Place, endpoint: ScriptedEndpoint, requests: int) -> subprocess.Popen[str]:
    """A run that waits for so many answers."""
    process = place.start(endpoint.url, "--num_workers=1", "--sandbox=host")
    deadline = time.monotonic() + 30
    while endpoint.count < requests and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_a_run_cleanly(place: Place, number: signal.Signals, status: int) -> None:
    with ScriptedEndpoint([say("late", reasoning="r", latency=60)]).in_thread() as endpoint:
        process = start_and_wait(place, endpoint, requests=2)
        assert process.stdout is not None
        process.send_signal(number)
        out = process.stdout.read()
        assert process.wait(30) == status, out
        process.stdout.close()
    assert f"🛑 Stopping: interrupted by {number.name}" in out and "2 failed" in out and "Traceback" not in out


def test_a_second_signal_ends_at_once(place: Place) -> None:
    with ScriptedEndpoint([say("late", reasoning="r", latency=60)]).in_thread() as endpoint:
        process = start_and_wait(place, endpoint, requests=2)
        assert process.stdout is not None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        while "second signal" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(10) == 130 and time.monotonic() - begun < 5
        process.stdout.close()


def test_a_traceback_is_for_verbose_only(place: Place, endpoint: ScriptedEndpoint) -> None:
    command = place.command(endpoint.url, "--num_workers=1")
    (place.root / "data").write_text("a file where the output root should be")
    for more, shown in (([], False), (["--verbose"], True)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=place.environment, check=False)
        assert done.returncode == 1 and "❌ Fatal error:" in done.stderr
        assert ("Traceback" in done.stderr) is shown


def test_a_terminal_gets_a_live_line(place: Place, endpoint: ScriptedEndpoint) -> None:
    import pty

    controller, terminal = pty.openpty()
    environment = {**place.environment, "TERM": "xterm", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        place.command(endpoint.url, "--num_workers=1", "--sandbox=host"),
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    os.close(controller)
    assert process.wait(30) == 0
    text = seen.decode()
    assert "⏳ 2/2 prompts" in text and "✅ Prompt 0 completed" in text and "BATCH PROCESSING COMPLETE" in text
    assert "\x1b[36m" not in text  # NO_COLOR
    assert text.rstrip().endswith("statistics.json") or "\x1b[?25h" in text  # the cursor is back


def test_python_m_gristmill() -> None:
    done = subprocess.run([sys.executable, "-m", "gristmill", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gristmill {__version__}\n"
