"""The examples run, and stay small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gristmill.cli.settings import read_prefill
from gristmill.dataset import read_tasks
from support.source import ROOT

EXAMPLES = ROOT / "examples"


def run(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hello_is_a_run_in_40_lines(tmp_path: Path) -> None:
    assert len((EXAMPLES / "hello.py").read_text(encoding="utf-8").splitlines()) <= 40
    printed = run(str(EXAMPLES / "hello.py"), cwd=tmp_path)
    assert "prompt 2: completed after 2 turns" in printed and "3 trajectories" in printed
    merged = tmp_path / "data" / "hello" / "trajectories.jsonl"
    assert len(merged.read_text(encoding="utf-8").splitlines()) == 3
    shown = run(str(EXAMPLES / "show.py"), str(merged), "1", cwd=tmp_path)
    assert "row 1: completed" in shown and "[human]\nWhat machine is this?" in shown and "[tool]" in shown


def test_the_prompts_of_the_demo_are_usable() -> None:
    dataset = read_tasks(str(EXAMPLES / "prompts.jsonl"))
    assert len(dataset.tasks) == 12 and not dataset.refused


def test_the_prefill_of_the_demo_shows_calls_and_answers() -> None:
    messages = read_prefill(str(EXAMPLES / "demo_prefill.json"))
    said = [json.loads(message["content"])["tool"] for message in messages if message["role"] == "assistant"]
    assert said == ["terminal", "final"] * (len(messages) // 4)
