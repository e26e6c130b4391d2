"""The table of flags: values by kind, and what a `RunConfig` gets of them."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.cli.flags import BY_NAME, FLAGS, Kind
from gristmill.cli.settings import read_config, read_prefill, warnings
from gristmill.config import DEFAULT_BASE_URL, KEY_VARIABLES, RunConfig
from gristmill.errors import SetupError, UsageError
from gristmill.types import Limits

REQUIRED: dict[str, Any] = {"dataset_file": "p.jsonl", "batch_size": 2, "run_name": "r"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEY_VARIABLES.values(), "TERMINAL_ENV"):
        monkeypatch.delenv(name, raising=False)


def test_every_flag_stands_once_and_points_to_a_field_or_is_read_by_the_command() -> None:
    assert len(BY_NAME) == len(FLAGS)
    config = RunConfig(dataset_file="", batch_size=1, run_name="")
    for flag in FLAGS:
        if flag.field:
            reduce(getattr, flag.field.split("."), config)  # raises AttributeError for a field that is none


def test_every_setting_of_a_run_has_a_flag_or_comes_from_the_environment() -> None:
    settings: set[str] = set()
    for name in RunConfig.__struct_fields__:
        if name in ("model", "sandbox"):
            part = type(getattr(RunConfig(dataset_file="", batch_size=1, run_name=""), name))
            settings |= {f"{name}.{inner}" for inner in part.__struct_fields__}
        else:
            settings.add(name)
    settings = settings - {"sandbox.limits"} | {f"sandbox.limits.{name}" for name in Limits.__struct_fields__}
    environment = {f"sandbox.{n}" for n in ("image", "cwd", "terminal_timeout", "options")}
    # Several flags, or a file, make these; the last two are for programs, not for the command line.
    made = {"prefill_messages", "verbosity", "tool_settings", "model.request_timeout", "model.max_retries"}
    assert settings - environment - made == {flag.field for flag in FLAGS if flag.field}


@given(st.text(max_size=40))
def test_text_is_taken_as_typed(text: str) -> None:
    assert BY_NAME["run_name"].read(text) == text
    assert BY_NAME["ephemeral_system_prompt"].read(text) == text


@given(st.text(max_size=12))
def test_a_whole_number_is_digits_or_refused(text: str) -> None:
    try:
        value = BY_NAME["batch_size"].read(text)
    except UsageError as error:
        assert str(error) == f"--batch_size must be a whole number, not {text!r}."
    else:
        assert text.lstrip("+-").isascii() and text.lstrip("+-").isdigit() and int(text) == value


@pytest.mark.parametrize("text", ["1_000", "1e3", "1.0", " 1", "١", "0x10", "", "9" * 19, "9" * 5000])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(UsageError, match="--seed must be a whole number"):
        BY_NAME["seed"].read(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "1,5", "", "1_0", "abc", "."])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(UsageError, match="--session_timeout must be a number"):
        BY_NAME["session_timeout"].read(text)


@pytest.mark.parametrize(("text", "value"), [("1.5", 1.5), ("2", 2.0), ("1e3", 1000.0), (".5", 0.5)])
def test_numbers(text: str, value: float) -> None:
    assert BY_NAME["max_cost"].read(text) == value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("True", True), ("0", False), ("no", False)])
def test_switches(text: str, value: bool) -> None:
    assert BY_NAME["resume"].read(text) is value


def test_names_come_with_commas() -> None:
    assert BY_NAME["providers_allowed"].read("a, b,c") == ("a", "b", "c")
    assert BY_NAME["filters"].read("none") == ()
    for text in ("", "a,,b", ","):
        with pytest.raises(UsageError, match="names with commas between them"):
            BY_NAME["filters"].read(text)


def test_defaults_are_those_of_the_settings() -> None:
    assert BY_NAME["max_turns"].shown_default == "10"
    assert BY_NAME["filters"].shown_default == "no_reasoning,unknown_tool"
    assert BY_NAME["session_timeout"].shown_default == "1800"
    assert BY_NAME["base_url"].shown_default == DEFAULT_BASE_URL
    assert BY_NAME["stream"].shown_default == ""


def example(flag_kind: Kind) -> tuple[str, Any]:
    return {
        Kind.TEXT: ("x", "x"),
        Kind.PATH: ("x", "x"),
        Kind.WHOLE: ("64", 64),
        Kind.NUMBER: ("7.5", 7.5),
        Kind.NAMES: ("turn_limit", ("turn_limit",)),
        Kind.SWITCH: ("true", True),
    }[flag_kind]


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.field], ids=lambda f: f.name)
def test_a_flag_reaches_its_field(flag: Any) -> None:
    text, value = example(flag.kind)
    special = {
        "base_url": "http://127.0.0.1:1/v1",
        "dialect": "json",
        "reasoning_effort": "high",
        "provider_sort": "price",
    }
    if flag.name in special:
        text = value = special[flag.name]
    given_values = REQUIRED | {flag.name: flag.read(text)}
    if flag.name in ("retry", "allow_changes"):
        given_values["resume"] = True
    assert reduce(getattr, flag.field.split("."), read_config(given_values)) == value


def test_missing_flags_are_named_together() -> None:
    with pytest.raises(UsageError, match="Missing --dataset_file, --batch_size, --run_name"):
        read_config({})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quiet": True, "verbose": True}, "contradict"),
        ({"retry": ("turn_limit",)}, "--retry needs --resume"),
        ({"allow_changes": True}, "--allow_changes needs --resume"),
        ({"dialect": "nope"}, "Unknown dialect: nope"),
        ({"provider_sort": "name"}, "Unknown provider sort: name"),
        ({"reasoning_effort": "huge"}, "Unknown reasoning effort: huge"),
        ({"log_prefix_chars": 0}, "--log_prefix_chars"),
        ({"session_timeout": 0.0}, "--session_timeout must be more than 0"),
        ({"sandbox_memory": 31}, "--sandbox_memory must be at least 32, not 31"),
        ({"sandbox_disk": -1}, "--sandbox_disk must be at least 1, not -1"),
        ({"sandbox_processes": 7}, "--sandbox_processes must be at least 8, not 7"),
        ({"sandbox_cpus": 0.001}, "--sandbox_cpus must be at least 0.01"),
        ({"sandbox_pool": -1}, "--sandbox_pool must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_config(REQUIRED | values)


def test_the_sandbox_comes_from_the_flag_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(REQUIRED).sandbox.kind == "local"
    monkeypatch.setenv("TERMINAL_ENV", "docker")
    monkeypatch.setenv("TERMINAL_DOCKER_IMAGE", "of-docker")
    monkeypatch.setenv("TERMINAL_MODAL_IMAGE", "of-modal")
    assert read_config(REQUIRED).sandbox.kind == "docker"
    chosen = read_config(REQUIRED | {"sandbox": "modal"}).sandbox
    assert (chosen.kind, chosen.image) == ("modal", "of-modal")


def test_limits_of_sandboxes_come_from_flags_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "512")
    monkeypatch.setenv("TERMINAL_CONTAINER_CPU", "1.5")
    given = REQUIRED | {"sandbox_memory": 256, "sandbox_disk": 64}
    assert read_config(given).sandbox.limits == Limits(memory_mb=256, disk_mb=64, cpus=1.5)


def test_flags_without_effect_are_told() -> None:
    def told(**values: Any) -> list[str]:
        return warnings(values, read_config(REQUIRED | values))

    assert told() == []
    assert told(model="local", base_url="http://127.0.0.1:1") == ["Without effect with the embedded model: --base_url."]
    assert "--sandbox_network" in told(sandbox="host", sandbox_network=True)[0]


@pytest.mark.parametrize(
    ("model", "warned"),
    [
        ("anthropic/claude-sonnet-4.6", True),
        ("claude-opus-4-7", True),
        ("claude-sonnet-5", True),
        ("claude-sonnet-4-20250514", False),
        ("claude-3-5-sonnet", False),
        ("other/model", False),
    ],
)
def test_an_assistant_message_at_the_end_of_a_prefill(tmp_path: Path, model: str, warned: bool) -> None:
    path = tmp_path / "prefill.json"
    path.write_text(json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]))
    values = {"prefill_messages_file": str(path), "model": model}
    assert bool(warnings(values, read_config(REQUIRED | values))) is warned


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "is not an array"),
        ("[", "is not JSON"),
        ('[{"role": "user", "content": "q"}, "x"]', "element 1 must have role and content"),
        ('[{"role": "user"}]', "element 0 must have"),
        ('[{"role": "boss", "content": "q"}]', "element 0 has a role that is not one of system, user, assistant"),
        ('[{"role": "user", "content": ["q"]}]', "element 0 has a content that is not text"),
        ('[{"role": "user", "content": "\\ud800"}]', "element 0 has a content that is not valid Unicode"),
    ],
)
def test_a_prefill_of_the_wrong_shape_names_the_element(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "prefill.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=words):
        read_prefill(str(path))


def test_a_prefill_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        read_prefill(str(tmp_path / "nope.json"))
