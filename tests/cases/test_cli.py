"""Bug cases of the command line: what was typed, what is refused, what every flag does."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.cli.flags import FLAGS
from gristmill.cli.main import main
from gristmill.testing.endpoint import ScriptedEndpoint, call, say
from support.runs import Place

SRC = Path(__file__).parents[2] / "src" / "gristmill"
ONE_CALL = [call("terminal", {"command": "echo hi"}, reasoning="first"), say("done", reasoning="second")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.dataset("one", "two", "three")
    return place


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(ONE_CALL).in_thread() as running:
        yield running


@pytest.fixture
def prefilled() -> Iterator[ScriptedEndpoint]:
    """For requests that carry one assistant message before their conversation."""
    with ScriptedEndpoint(ONE_CALL, prefill=1).in_thread() as running:
        yield running


def refused(place: Place, url: str, *flags: str, without: str = "") -> str:
    """Start with flags that must not be; asserts what holds for every refusal and returns the line on stderr."""
    command = [part for part in place.command(url, *flags) if not without or not part.startswith(without)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=place.environment, cwd=place.root, timeout=60, check=False
    )
    assert done.returncode in (1, 2), done
    assert done.stderr.startswith("❌ Fatal error: ") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not (place.root / "data").exists(), "a run directory was made"
    return done.stderr


def test_cl_01_argument_values_are_taken_as_typed(
    place: Place, endpoint: ScriptedEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("2026", "1e5", "297e7814231", "0000_0000", "None", "a,b", "007"):
        argv = place.command(endpoint.url, f"--run_name={name}", "--dry_run")
        assert main(argv[argv.index("run") :]) == 0
        assert f"Run name: {name}\n" in capsys.readouterr().out
    assert not place.directory.parent.exists()
    place.run(endpoint.url, "--run_name=1e5", "--num_workers=1")
    assert [path.name for path in (place.root / "data").iterdir()] == ["1e5"]
    assert json.loads((place.root / "data" / "1e5" / "run.json").read_text())["run_name"] == "1e5"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "a\\b", "a\nb", " a", "a\x7f"])
def test_cl_01_a_name_that_is_no_folder_is_refused_with_the_rule(place: Place, name: str) -> None:
    assert "one path component" in refused(place, "http://127.0.0.1:9/v1", f"--run_name={name}")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--dataset_file=nope.jsonl", "nope.jsonl"),
        ("--batch_size=0", "--batch_size must be a whole number of at least 1, not 0"),
        ("--batch_size=-1", "--batch_size must be a whole number of at least 1, not -1"),
        ("--batch_size=two", "--batch_size must be a whole number, not 'two'"),
        ("--num_workers=0", "--num_workers must be a whole number of at least 1"),
        ("--distribution=nope", "Unknown distribution: nope"),
        ("--max_turns=0", "--max_turns must be a whole number of at least 1"),
        ("--max_samples=-5", "--max_samples must be a whole number of at least 1"),
        ("--unknown_flag=1", "Unknown flag: --unknown_flag"),
        ("--max_turn=3", "Did you mean --max_turns"),
        ("--sandbox=nope", "nope"),
        ("--filters=nope", "nope"),
        ("--model=", "--model must not be empty"),
        ("--base_url=localhost:8000", "--base_url must be an http or https address"),
        ("stray", "stray"),
    ],
)
def test_cl_02_errors_do_not_exit_with_0(place: Place, endpoint: ScriptedEndpoint, flag: str, words: str) -> None:
    assert words in refused(place, endpoint.url, flag)
    assert endpoint.count == 0


def test_cl_02_a_missing_flag_is_named(place: Place) -> None:
    assert "Missing --run_name." in refused(place, "http://127.0.0.1:9/v1", without="--run_name")


def test_cl_04_a_toolset_that_does_not_exist_stops_the_start(place: Place, endpoint: ScriptedEndpoint) -> None:
    own = place.root / "own.toml"
    own.write_text('[mine]\ndescription = "d"\ntoolsets = {nope = 50}\n')
    assert "nope" in refused(place, endpoint.url, f"--distributions_file={own}", "--distribution=mine")
    assert "Unknown flag: --toolsets" in refused(place, endpoint.url, "--toolsets=")
    place.dataset("fine", {"prompt": "odd", "toolsets": ["terminal", "nope"]})
    assert "line 2" in refused(place, endpoint.url)
    assert endpoint.count == 0


def test_cl_04_a_draw_that_is_empty_takes_the_most_probable(place: Place, endpoint: ScriptedEndpoint) -> None:
    own = place.root / "own.toml"
    own.write_text('[mine]\ndescription = "d"\ntoolsets = {file = 0, terminal = 0.0001}\n')
    place.run(endpoint.url, f"--distributions_file={own}", "--distribution=mine", "--num_workers=1")
    assert [row["toolsets_used"] for row in place.merged()] == [["terminal"]] * 3


def test_cl_06_a_console_that_is_not_utf_8(place: Place) -> None:
    place.dataset("日本語 😀", {"prompt": "plain", "note": "é"})
    with ScriptedEndpoint([say("答え 😀", reasoning="理由")]).in_thread() as endpoint:
        bare = {k: v for k, v in place.environment.items() if not k.startswith(("LC_", "PYTHON"))}
        done = subprocess.run(
            [*place.command(endpoint.url, "--verbose", "--num_workers=1")],
            capture_output=True,
            env={**bare, "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
            cwd=place.root,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.decode("ascii")
    assert "[ok] Prompt 0 completed" in printed and "BATCH PROCESSING COMPLETE" in printed
    assert done.stderr == b""
    values = {row["conversations"][1]["value"]: row["conversations"][2]["value"] for row in place.merged()}
    assert "答え 😀" in values["日本語 😀"] and "理由" in values["日本語 😀"]
    for path in place.directory.glob("*.json*"):
        if path.suffix in (".json", ".jsonl"):
            path.read_bytes().decode("utf-8")


def fields_read(*, skip: tuple[str, ...]) -> set[str]:
    """Names of attributes that the package's modules read, apart from the skipped ones."""
    found: set[str] = set()
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] not in skip:
            tree = ast.parse(path.read_text())
            found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return found


def test_cl_07_no_flag_sets_what_nothing_reads() -> None:
    read = fields_read(skip=("cli", "config.py"))
    in_cli = fields_read(skip=("config.py",))
    printing = {"verbosity", "log_prefix_chars"}
    for flag in FLAGS:
        # 0 stands for a number that follows from the workers, so the runner reads what was made of it.
        field = {"concurrency": "sessions_in_flight"}.get(flag.field, flag.field.rpartition(".")[2])
        if field:
            assert field in (in_cli if field in printing else read), f"nothing reads --{flag.name}"


def test_cl_07_flags_change_what_they_say(
    place: Place, endpoint: ScriptedEndpoint, prefilled: ScriptedEndpoint
) -> None:
    prefill = place.root / "prefill.json"
    prefill.write_text(json.dumps([{"role": "user", "content": "PREFILL-Q"}, {"role": "assistant", "content": "A"}]))
    place.dataset(*({"prompt": "no", "task": f"task {n}"} for n in range(3)))
    plain = place.run(endpoint.url, "--run_name=plain", "--num_workers=1")
    before = [seen.body for seen in endpoint.requests]
    place.run(
        prefilled.url,
        "--prompt-field=task",
        "--max-samples=2",
        "--samples_per_prompt",
        "2",
        "--max_turns=1",
        "--stream=True",
        "--max_tokens=77",
        "--ephemeral_system_prompt=EPHEMERAL-TEXT",
        f"--prefill_messages_file={prefill}",
        "--reasoning_effort=low",
        "--seed=99",
        "--batch_size=1",
        "--num_workers=1",
    )
    after = [seen.body for seen in prefilled.requests]
    rows, manifest = place.merged(), json.loads((place.directory / "run.json").read_text())
    assert {row["conversations"][1]["value"] for row in rows} == {"task 0", "task 1"}
    assert sorted((row["prompt_index"], row["metadata"]["sample"]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(row["outcome"], row["api_calls"]) for row in rows} == {("turn_limit", 1)}
    assert {row["metadata"]["seed"] for row in rows} == {99} and manifest["seed"] == 99
    assert sorted(path.name for path in place.directory.glob("batch_*.jsonl")) == ["batch_0.jsonl", "batch_1.jsonl"]
    assert all(body.get("stream") for body in after) and not any(body.get("stream") for body in before)
    assert all(77 in body.values() for body in after) and not any(77 in body.values() for body in before)
    assert all("low" in json.dumps(body) for body in after)
    sent = json.dumps(after)
    assert "EPHEMERAL-TEXT" in sent and "PREFILL-Q" in sent
    kept = b"".join(path.read_bytes() for path in place.directory.glob("*.json*"))
    assert b"EPHEMERAL-TEXT" not in kept and b"PREFILL-Q" not in kept
    assert "Prompt 0 completed" in plain


def test_cl_07_what_is_printed_and_kept(place: Place) -> None:
    with ScriptedEndpoint([say("no thought")]).in_thread() as endpoint:
        usual = place.run(endpoint.url, "--num_workers=1")
        assert usual.count("discarded (no reasoning") == 3 and place.statistics()["discarded_no_reasoning"] == 3
        quiet = place.run(endpoint.url, "--num_workers=1", "--filters=none", "--quiet", "--run_name=q")
        assert quiet.count("\n") == 1 and "3 kept" in quiet
        verbose = place.run(endpoint.url, "--num_workers=1", "--filters=none", "--verbose", "--run_name=v")
        assert "1 turns" in verbose and "1 turns" not in usual


def test_cl_07_a_setting_that_does_not_exist_is_reported() -> None:
    import msgspec

    from gristmill.config import RunConfig

    with pytest.raises(msgspec.ValidationError, match="nope"):
        msgspec.convert({"dataset_file": "d", "batch_size": 1, "run_name": "r", "nope": 1}, RunConfig)


@pytest.mark.parametrize("value", ["0", "-1", "0.5"])
def test_cl_09_max_samples_0_is_refused(place: Place, endpoint: ScriptedEndpoint, value: str) -> None:
    assert "--max_samples must be a whole number" in refused(place, endpoint.url, f"--max_samples={value}")
    assert endpoint.count == 0
