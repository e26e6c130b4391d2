"""The one table of flags ↔ `RunConfig`, and what their values may look like.

A value is read by its flag's kind and by nothing else: `--run_name=2026` is the text "2026". A new flag is one field in
`config.py` and one row here.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from gristmill.config import DIALECTS, EFFORTS, PROVIDER_SORTS, RunConfig
from gristmill.errors import UsageError

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Kind(enum.Enum):
    """What a flag's value is; the value of the member is how the help names it."""

    TEXT = "TEXT"
    PATH = "PATH"
    WHOLE = "N"
    NUMBER = "X"
    NAMES = "A,B,…"
    SWITCH = ""


@dataclass(frozen=True)
class Flag:
    """One flag. `field` is the dotted place in `RunConfig`; it is empty for what only the command itself reads.

    `default` is shown where the field's own default says it badly.
    """

    name: str
    kind: Kind
    group: str
    help: str
    field: str = ""
    required: bool = False
    default: str = ""

    def read(self, text: str) -> Any:
        """The value of a text as it was typed. Raises `UsageError`."""
        return read_value(self.kind, self.name, text)

    @property
    def shown_default(self) -> str:
        """The default as help and documentation show it; empty where there is none to speak of."""
        if self.default or not self.field or self.required:
            return self.default
        value: Any = reduce(getattr, self.field.split("."), _EXAMPLE)
        if isinstance(value, tuple):
            return ",".join(value)
        if isinstance(value, float):
            return f"{value:g}"
        return "" if value is None or value is False else str(value)


def read_value(kind: Kind, name: str, text: str) -> Any:
    """The value of the text that was typed for the flag `name`. Raises `UsageError`."""
    return _READERS[kind](name, text)


def _read_text(name: str, text: str) -> str:
    return text


def _read_whole(name: str, text: str) -> int:
    if not _WHOLE.fullmatch(text) or abs(int(text)) >= 2**63:
        raise UsageError(f"--{name} must be a whole number, not {text!r}.")
    return int(text)


def _read_number(name: str, text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise UsageError(f"--{name} must be a number, not {text!r}.")
    return value


def _read_switch(name: str, text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise UsageError(f"--{name} is a switch: give it alone, or with true or false, not {text!r}.")
    return _SWITCH[text.lower()]


def _read_names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if names == ("none",):
        return ()
    if not all(names):
        raise UsageError(f"--{name} takes names with commas between them, not {text!r}.")
    return names


_READERS = {
    Kind.TEXT: _read_text,
    Kind.PATH: _read_text,
    Kind.WHOLE: _read_whole,
    Kind.NUMBER: _read_number,
    Kind.SWITCH: _read_switch,
    Kind.NAMES: _read_names,
}
_EXAMPLE = RunConfig(dataset_file="", batch_size=1, run_name="")

PROMPTS, AGENT, MODEL, ROUTING, SANDBOX, PACE, BUDGET, AGAIN, RESULT, PRINT = (
    "What to run",
    "Tools and turns",
    "Model",
    "Routing by OpenRouter",
    "Sandbox",
    "Pace",
    "Budget of the whole run",
    "Running again",
    "What is kept",
    "What is printed",
)

FLAGS: tuple[Flag, ...] = (
    Flag("dataset_file", Kind.PATH, PROMPTS, "JSONL file, one prompt a line", "dataset_file", required=True),
    Flag("batch_size", Kind.WHOLE, PROMPTS, "prompts per output file", "batch_size", required=True),
    Flag("run_name", Kind.TEXT, PROMPTS, "folder of this run under the output root", "run_name", required=True),
    Flag("output_dir", Kind.PATH, PROMPTS, "output root", "output_dir"),
    Flag("prompt_field", Kind.TEXT, PROMPTS, "field of a row that holds its prompt", "prompt_field"),
    Flag("max_samples", Kind.WHOLE, PROMPTS, "only the first N rows", "max_samples", default="all"),
    Flag("samples_per_prompt", Kind.WHOLE, PROMPTS, "independent sessions of each prompt", "samples_per_prompt"),
    Flag("distribution", Kind.TEXT, AGENT, "how each session's toolsets are drawn", "distribution"),
    Flag(
        "distributions_file",
        Kind.PATH,
        AGENT,
        "TOML or JSON file with distributions of your own",
        "distributions_file",
    ),
    Flag("mcp_config", Kind.PATH, AGENT, "JSON file of MCP servers, each one a toolset", "mcp_config"),
    Flag("tools", Kind.NAMES, AGENT, "toolsets of your own, as module:name", "tools"),
    Flag(
        "skip_unavailable_toolsets",
        Kind.SWITCH,
        AGENT,
        "leave out toolsets that cannot work here instead of refusing to start",
        "skip_unavailable_toolsets",
    ),
    Flag(
        "allow_private_urls",
        Kind.SWITCH,
        AGENT,
        "let web tools reach private and loopback addresses",
        "allow_private_urls",
    ),
    Flag("max_turns", Kind.WHOLE, AGENT, "model turns per session", "max_turns"),
    Flag("session_timeout", Kind.NUMBER, AGENT, "seconds of wall time per session", "session_timeout"),
    Flag("seed", Kind.WHOLE, AGENT, "decides every random choice of the run", "seed", default="drawn, recorded"),
    Flag("model", Kind.TEXT, MODEL, "model name; local is the embedded model", "model.name"),
    Flag("base_url", Kind.TEXT, MODEL, "any OpenAI-compatible endpoint", "model.base_url"),
    Flag("api_key", Kind.TEXT, MODEL, "key of the endpoint", "model.api_key", default="the variable of its host"),
    Flag("dialect", Kind.TEXT, MODEL, f"how the endpoint is spoken to: {', '.join(DIALECTS)}", "model.dialect"),
    Flag("stream", Kind.SWITCH, MODEL, "ask for streamed answers", "model.stream"),
    Flag("max_tokens", Kind.WHOLE, MODEL, "output tokens per answer", "model.max_tokens", default="the provider's"),
    Flag(
        "ephemeral_system_prompt",
        Kind.TEXT,
        MODEL,
        "system text that is sent but never written down",
        "ephemeral_system_prompt",
    ),
    Flag(
        "prefill_messages_file",
        Kind.PATH,
        MODEL,
        "JSON array of {role, content} put before every prompt, never written down",
    ),
    Flag("reasoning_effort", Kind.TEXT, MODEL, ", ".join(EFFORTS), "model.reasoning_effort"),
    Flag(
        "reasoning_disabled",
        Kind.SWITCH,
        MODEL,
        "ask for no reasoning; wins over the effort",
        "model.reasoning_disabled",
    ),
    Flag(
        "record_tokens",
        Kind.SWITCH,
        MODEL,
        "keep token ids and logprobs in the session records, where the server gives them",
        "model.record_tokens",
    ),
    Flag("providers_allowed", Kind.NAMES, ROUTING, "only these providers", "model.providers_allowed"),
    Flag("providers_ignored", Kind.NAMES, ROUTING, "never these providers", "model.providers_ignored"),
    Flag("providers_order", Kind.NAMES, ROUTING, "these providers first, in this order", "model.providers_order"),
    Flag("provider_sort", Kind.TEXT, ROUTING, ", ".join(PROVIDER_SORTS), "model.provider_sort"),
    Flag(
        "sandbox",
        Kind.TEXT,
        SANDBOX,
        "where commands run: local (bubblewrap), docker, singularity, modal, daytona; unisolated: ssh, host",
        "sandbox.kind",
        default="TERMINAL_ENV, else local",
    ),
    Flag("sandbox_network", Kind.SWITCH, SANDBOX, "give sandboxes the network", "sandbox.network"),
    Flag(
        "sandbox_memory",
        Kind.WHOLE,
        SANDBOX,
        "MiB of memory of each sandbox",
        "sandbox.limits.memory_mb",
        default="local, host: 4096, or half of the machine's",
    ),
    Flag(
        "sandbox_processes",
        Kind.WHOLE,
        SANDBOX,
        "processes and threads of each sandbox",
        "sandbox.limits.processes",
        default="local, host: 1024",
    ),
    Flag("sandbox_cpus", Kind.NUMBER, SANDBOX, "CPUs of each sandbox", "sandbox.limits.cpus", default="no limit"),
    Flag(
        "sandbox_disk",
        Kind.WHOLE,
        SANDBOX,
        "MiB that each sandbox may write; the workspace of local then lies in memory",
        "sandbox.limits.disk_mb",
        default="no limit",
    ),
    Flag(
        "sandbox_pool",
        Kind.WHOLE,
        SANDBOX,
        "started sandboxes that each worker keeps ready, for kinds that start slowly",
        "sandbox.pool",
    ),
    Flag("num_workers", Kind.WHOLE, PACE, "worker processes", "num_workers"),
    Flag("concurrency", Kind.WHOLE, PACE, "sessions at once over all workers", "concurrency", default="4 × workers"),
    Flag("max_cost", Kind.NUMBER, BUDGET, "US dollars; no turn starts that could pass it", "max_cost"),
    Flag("max_total_tokens", Kind.WHOLE, BUDGET, "tokens, prompt and completion", "max_total_tokens"),
    Flag("max_time", Kind.NUMBER, BUDGET, "seconds of wall time of this invocation", "max_time"),
    Flag("pause_limit", Kind.NUMBER, BUDGET, "seconds that an empty account may hold the run", "pause_limit"),
    Flag("resume", Kind.SWITCH, AGAIN, "go on with the run directory of this name", "resume"),
    Flag("retry", Kind.NAMES, AGAIN, "with --resume: outcomes to run again, turn_limit for instance", "retry"),
    Flag("allow_changes", Kind.SWITCH, AGAIN, "with --resume: go on though settings differ", "allow_changes"),
    Flag("filters", Kind.NAMES, RESULT, "quality filters to apply; none switches all off", "filters"),
    Flag("list_distributions", Kind.SWITCH, PRINT, "print every distribution and leave"),
    Flag("dry_run", Kind.SWITCH, PRINT, "check everything, print the plan, ask no model"),
    Flag("verbose", Kind.SWITCH, PRINT, "print more; tracebacks too"),
    Flag("quiet", Kind.SWITCH, PRINT, "print warnings, failures and one closing line"),
    Flag("log_prefix_chars", Kind.WHOLE, PRINT, "characters of a prompt or a reason in a line", "log_prefix_chars"),
)
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}
