"""From what was typed to a `RunConfig`: the table of flags, the environment, and the prefill file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gristmill.cli.flags import BY_NAME
from gristmill.config import (
    ModelConfig,
    RunConfig,
    sandbox_from_environment,
    tool_settings,
)
from gristmill.errors import SetupError, UsageError

_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?([0-9]+)(?:[.-]([0-9]{1,2})(?![0-9]))?")
_MAY_BE_EMPTY = ("api_key", "ephemeral_system_prompt", "run_name")  # the last has a rule of its own
_PREFILL_ROLES = ("system", "user", "assistant")


def read_config(given: Mapping[str, Any]) -> RunConfig:
    """The settings of a run, from the values of the flags that were given, by their names in the table.

    Raises:
        UsageError: a value that cannot be, or flags that contradict each other.
        SetupError: a file or a key is missing.
    """
    missing = [f"--{flag.name}" for flag in BY_NAME.values() if flag.required and flag.name not in given]
    if missing:
        raise UsageError(f"Missing {', '.join(missing)}.", "`gristmill run --help` explains every flag.")
    _check_combinations(given)
    top: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {"model": {}, "sandbox": {}, "sandbox.limits": {}}
    for name, value in given.items():
        part, _, field = BY_NAME[name].field.rpartition(".")
        if field:
            (nested[part] if part else top)[field] = value
    if "prefill_messages_file" in given:
        top["prefill_messages"] = read_prefill(given["prefill_messages_file"])
    if given.get("quiet") or given.get("verbose"):
        top["verbosity"] = "quiet" if given.get("quiet") else "verbose"
    sandbox = sandbox_from_environment(kind=nested["sandbox"].get("kind"))
    limits = msgspec.structs.replace(sandbox.limits, **nested["sandbox.limits"])
    config = RunConfig(
        **top,
        model=ModelConfig(**nested["model"]),
        sandbox=msgspec.structs.replace(sandbox, limits=limits, **nested["sandbox"]),
        tool_settings=tool_settings(),
    )
    config.validate()
    address = urlsplit(config.model.base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UsageError(f"--base_url must be an http or https address, not {config.model.base_url!r}.")
    return config


def warnings(given: Mapping[str, Any], config: RunConfig) -> list[str]:
    """A sentence for each flag that was given and changes nothing, or that the endpoint will refuse."""
    found = []
    if config.model.local:
        idle = [f"--{name}" for name in ("base_url", "api_key", "stream") if given.get(name)]
        if idle:
            found.append(f"Without effect with the embedded model: {', '.join(idle)}.")
    if config.sandbox.kind == "host" and given.get("sandbox_network"):
        found.append("Without effect with --sandbox=host, which always has the host's network: --sandbox_network.")
    if config.sandbox.kind in ("local", "host") and config.sandbox.pool:
        found.append(f"Without effect with --sandbox={config.sandbox.kind}, which starts at once: --sandbox_pool.")
    if config.prefill_messages and config.prefill_messages[-1]["role"] == "assistant":
        version = _CLAUDE.search(config.model.name)
        if version and (int(version[1]), int(version[2] or 0)) >= (4, 6):
            found.append(f"{config.model.name} answers 400 to prefill messages that end with an assistant message.")
    return found


def read_prefill(path: str) -> tuple[dict[str, str], ...]:
    """The messages of a prefill file: a JSON array of `{"role", "content"}`, both texts.

    Raises:
        SetupError: the file cannot be read.
        UsageError: its shape is wrong; names the element, counted from 0.
    """
    flag = f"--prefill_messages_file {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SetupError(f"{flag} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{flag} is not JSON: {error}.") from None
    return check_prefill(data, flag)


def check_prefill(data: Any, flag: str) -> tuple[dict[str, str], ...]:
    """Prefill messages as settings hold them; `flag` says where they come from. Raises `UsageError`."""
    rule = 'It holds a JSON array of {"role": "user", "content": "text"}.'
    if not isinstance(data, list):
        raise UsageError(f"{flag} is not an array.", rule)
    for at, element in enumerate(data):
        if not isinstance(element, dict) or set(element) != {"role", "content"}:
            raise UsageError(f"{flag}: element {at} must have role and content, and nothing else.", rule)
        if element["role"] not in _PREFILL_ROLES:
            raise UsageError(f"{flag}: element {at} has a role that is not one of {', '.join(_PREFILL_ROLES)}.", rule)
        if not isinstance(element["content"], str):
            raise UsageError(f"{flag}: element {at} has a content that is not text.", rule)
        if any(0xD800 <= ord(c) < 0xE000 for c in element["content"]):
            raise UsageError(f"{flag}: element {at} has a content that is not valid Unicode.", rule)
    return tuple(data)


def _check_combinations(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value == "" and name not in _MAY_BE_EMPTY:
            raise UsageError(f"--{name} must not be empty.")
    if given.get("quiet") and given.get("verbose"):
        raise UsageError("--quiet and --verbose contradict each other.", "Give one of them.")
    for name in ("retry", "allow_changes"):
        if given.get(name) and not given.get("resume"):
            raise UsageError(f"--{name} needs --resume.", "Without it nothing has run yet.")
