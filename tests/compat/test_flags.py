"""The command line and the class that users of the reference type and import."""

from __future__ import annotations

import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from gristmill.cli.batch import BatchRunner
from gristmill.cli.flags import BY_NAME, Kind
from gristmill.cli.settings import read_config
from gristmill.errors import UsageError
from gristmill.testing.endpoint import ScriptedEndpoint, say
from support.runs import Place

ROOT = Path(__file__).parents[2]

# The reference's flags with their defaults; None where it has none.
REFERENCE: dict[str, Any] = {
    "dataset_file": None,
    "batch_size": None,
    "run_name": None,
    "distribution": "default",
    "model": "anthropic/claude-sonnet-4.6",
    "api_key": None,
    "base_url": "https://openrouter.ai/api/v1",
    "max_turns": 10,
    "num_workers": 4,
    "resume": False,
    "verbose": False,
    "list_distributions": False,
    "ephemeral_system_prompt": None,
    "log_prefix_chars": 100,
    "providers_allowed": None,
    "providers_ignored": None,
    "providers_order": None,
    "provider_sort": None,
    "max_tokens": None,
    "reasoning_effort": None,
    "reasoning_disabled": False,
    "prefill_messages_file": None,
    "max_samples": None,
}


@pytest.mark.parametrize("name", list(REFERENCE))
def test_every_flag_of_the_reference_is_there_with_its_default(name: str) -> None:
    flag = BY_NAME[name]
    if REFERENCE[name] not in (None, False):
        config = read_config({"dataset_file": "d", "batch_size": 1, "run_name": "r"})
        assert reduce(getattr, flag.field.split("."), config) == REFERENCE[name]
    assert (flag.kind is Kind.SWITCH) == (REFERENCE[name] is False)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "batch_runner.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("spelling", ["underscores", "dashes", "spaces"])
def test_batch_runner_py_is_the_run_command(tmp_path: Path, spelling: str) -> None:
    place = Place(tmp_path)
    place.dataset("one")
    with ScriptedEndpoint([say("done", reasoning="r")]).in_thread() as endpoint:
        flags = place.command(endpoint.url, "--resume=True", "--verbose", "--num_workers=1")[4:]
        if spelling == "dashes":
            flags = [name.replace("_", "-") + at + value for name, at, value in (f.partition("=") for f in flags)]
        elif spelling == "spaces":
            flags = [part for flag in flags for part in flag.split("=", 1)]
        done = run(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "✅ Prompt 0 completed" in done.stdout and len(place.merged()) == 1


def test_batch_runner_py_lists_distributions_without_anything_else(tmp_path: Path) -> None:
    done = run("--list_distributions", cwd=tmp_path)
    names = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert done.returncode == 0 and len(names) == 17 and names == sorted(names)
    assert list(tmp_path.iterdir()) == []


def test_batch_runner_py_without_flags_says_what_is_missing(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("❌ Fatal error: Missing --dataset_file, --batch_size, --run_name.")


def test_the_class_of_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path)
    path = place.dataset("one", "two")
    script = [say("done", reasoning="r")]
    with ScriptedEndpoint(script, prefill=1).in_thread() as endpoint:

        def runner(**more: Any) -> BatchRunner:
            return BatchRunner(
                dataset_file=str(path),
                batch_size=1,
                run_name="r",
                distribution="terminal_only",
                max_iterations=3,
                base_url=endpoint.url,
                model="scripted",
                num_workers=1,
                max_samples=1,
                providers_allowed=None,
                reasoning_config={"effort": "low"},
                prefill_messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                output_dir=str(tmp_path / "data"),
                **more,
            )

        first = runner()
        assert first.config.max_turns == 3 and first.config.model.reasoning_effort == "low"
        assert first.run(resume=False).exit_status == 0
        assert endpoint.count == 1 and "BATCH PROCESSING COMPLETE" in capsys.readouterr().out
        assert runner(seed=None).run(resume=True).exit_status == 0
        assert endpoint.count == 1 and "already been processed" in capsys.readouterr().out
    assert len(place.merged()) == 1
    with pytest.raises(UsageError, match="Unknown keyword: worker"):
        runner(worker=3)
    with pytest.raises(UsageError, match="prefill_messages: element 0"):
        BatchRunner("d", 1, "r", base_url="http://127.0.0.1:9", prefill_messages=[{"role": "user"}])


def test_the_module_gives_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", "")  # importing sets it for workers
    from importlib import import_module

    module = import_module("batch_runner")
    assert module.BatchRunner is BatchRunner
    with pytest.raises(AttributeError):
        _ = module.nope
