"""`BatchRunner`: the reference's Python face of a run, for scripts that import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gristmill.cli.flags import BY_NAME
from gristmill.cli.run import run_config
from gristmill.cli.settings import check_prefill, read_config, warnings
from gristmill.errors import UsageError
from gristmill.events import RunReport


class BatchRunner:
    """One run. Every flag of the command line is a keyword of the same name; None is its default.

    Args:
        dataset_file: JSONL path.
        batch_size: prompts per output file.
        run_name: folder of the run under the output root.
        distribution: how toolsets are drawn.
        max_iterations: model turns per session; the reference's word for `max_turns`.
        reasoning_config: `{"enabled": False}` or `{"effort": "high"}`, as the reference takes it.
        prefill_messages: messages put before every prompt, instead of `prefill_messages_file`.

    Raises:
        UsageError: a value that cannot be, or a keyword that is no flag.
        SetupError: a file is missing.
    """

    def __init__(
        self,
        dataset_file: str,
        batch_size: int,
        run_name: str,
        distribution: str = "default",
        max_iterations: int = 10,
        *,
        reasoning_config: Mapping[str, Any] | None = None,
        prefill_messages: Sequence[Mapping[str, str]] | None = None,
        **flags: Any,
    ) -> None:
        flags |= {
            "dataset_file": dataset_file,
            "batch_size": batch_size,
            "run_name": run_name,
            "distribution": distribution,
        }
        flags.setdefault("max_turns", max_iterations)
        if reasoning_config:
            flags["reasoning_disabled"] = reasoning_config.get("enabled") is False
            flags["reasoning_effort"] = reasoning_config.get("effort")
        unknown = [name for name in flags if name not in BY_NAME]
        if unknown:
            raise UsageError(f"Unknown keyword: {unknown[0]}.", "`gristmill run --help` lists what there is.")
        # Read like typed text, so that a keyword and a flag have the same rules.
        self._given = {
            name: BY_NAME[name].read(_as_typed(value)) for name, value in flags.items() if value not in (None, ())
        }
        config = read_config(self._given)
        if prefill_messages is not None:
            messages = check_prefill([dict(message) for message in prefill_messages], "prefill_messages")
            config = msgspec.structs.replace(config, prefill_messages=messages)
        self.config = config

    def run(self, resume: bool = False) -> RunReport:
        """Run to the end, with the command line's lines on stdout.

        Raises:
            GristmillError: the run could not start, or ended before its time.
        """
        config = msgspec.structs.replace(self.config, resume=resume or self.config.resume)
        return run_config(config, warnings(self._given, config))


def _as_typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
