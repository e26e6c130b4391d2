"""`run.json`: what a run is, without secrets. Everything else in the directory is rows or follows from them."""

from __future__ import annotations

import datetime
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gristmill import __version__
from gristmill.config import TOOL_CHOICES, RunConfig, is_loopback
from gristmill.errors import StoreError
from gristmill.run.atomic import write_atomic
from gristmill.run.layout import Layout
from gristmill.task import Dataset
from gristmill.trajectory import timestamp

FORMAT = 1

# Settings that say how a run is carried out, not what its rows are; they may differ between invocations.
FREE = frozenset(
    {
        "allow_changes",
        "batch_size",
        "concurrency",
        "dataset_file",
        "log_prefix_chars",
        "max_cost",
        "max_samples",
        "max_time",
        "max_total_tokens",
        "model.max_retries",
        "model.record_tokens",
        "model.request_timeout",
        "model.stream",
        "num_workers",
        "output_dir",
        "pause_limit",
        "resume",
        "retry",
        "run_name",
        "samples_per_prompt",
        "sandbox.pool",
        "seed",  # compared with the seed that was drawn, see `changed_settings`
        "verbosity",
    }
)

# Settings under the names by which users give them.
_FLAGS = {"model.name": "model", "sandbox.kind": "sandbox", **{f"tool_settings.{name}": name for name in TOOL_CHOICES}}


class Invocation(msgspec.Struct, kw_only=True):
    """One start of the run. `ended` is empty while it runs; a killed one gets the time of its last row.

    `changes` lists settings that differ from those before, as `model: a → b`.
    """

    started: str
    ended: str = ""
    reason: str = ""
    seconds: float = 0.0
    pid: int = 0
    host: str = ""
    version: str = ""
    changes: list[str] = []


class DatasetFacts(msgspec.Struct, kw_only=True):
    """The dataset as the last invocation read it. `prompts` are its usable rows, `samples` is samples_per_prompt.

    `beyond` counts outcomes in the directory that this dataset does not ask for.
    """

    path: str = ""
    digest: str = ""
    rows: int = 0
    prompts: int = 0
    refused: int = 0
    samples: int = 1
    beyond: int = 0


class Manifest(msgspec.Struct, kw_only=True):
    """`run.json`.

    `known_tools` are the columns of `tool_stats`, in order; tools of later invocations come behind. `adopted_tools` are
    further tools that rows of the reference know. `renamed` lists (key, sample, new key) of outcomes that belong to
    another task of the same content: one that failed where this one succeeded, or that was run again by `--retry`.
    """

    format: int = FORMAT
    run_name: str
    run_id: str
    created: str
    made_by: str = "gristmill"
    seed: int
    model: str
    distribution: str
    known_tools: list[str]
    adopted_tools: list[str] = []
    settings: dict[str, Any]
    dataset: DatasetFacts
    versions: dict[str, str]
    invocations: list[Invocation] = []
    renamed: list[tuple[str, int, str]] = []

    @property
    def duration_seconds(self) -> float:
        """Wall time of all invocations together."""
        return sum(invocation.seconds for invocation in self.invocations)


def new_manifest(config: RunConfig, dataset: Dataset, known_tools: Sequence[str]) -> Manifest:
    """The manifest of a run that starts now; a seed is drawn where none is set."""
    seed = config.seed if config.seed is not None else secrets.randbelow(2**31)
    return Manifest(
        run_name=config.run_name,
        run_id=f"{config.run_name}-{secrets.token_hex(4)}",
        created=timestamp(),
        seed=seed,
        model=config.model.name,
        distribution=config.distribution,
        known_tools=list(known_tools),
        settings=config.public(),
        dataset=dataset_facts(config, dataset),
        versions=versions(),
    )


def dataset_facts(config: RunConfig, dataset: Dataset) -> DatasetFacts:
    """What the manifest says of a dataset; `beyond` is known only after `owed`."""
    return DatasetFacts(
        path=dataset.path,
        digest=dataset.digest,
        rows=dataset.rows,
        prompts=len(dataset.tasks),
        refused=len(dataset.refused),
        samples=config.samples_per_prompt,
    )


def versions() -> dict[str, str]:
    """What this invocation runs on."""
    return {
        "gristmill": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def begin_invocation(manifest: Manifest, changes: Sequence[str], last_row: float) -> None:
    """Enter a new invocation, and close an earlier one that was killed; `last_row` is the time of the newest row."""
    if manifest.invocations and not manifest.invocations[-1].ended:
        killed = manifest.invocations[-1]
        started = _seconds(killed.started)
        killed.ended = timestamp(datetime.datetime.fromtimestamp(max(started, last_row)))
        killed.seconds = max(0.0, last_row - started)
        killed.reason = "killed"
    manifest.invocations.append(
        Invocation(
            started=timestamp(),
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            changes=list(changes),
        )
    )


def end_invocation(manifest: Manifest, seconds: float, reason: str) -> None:
    """Close the present invocation."""
    present = manifest.invocations[-1]
    present.ended, present.seconds, present.reason = timestamp(), seconds, reason


def changed_settings(manifest: Manifest, config: RunConfig) -> list[str]:
    """Settings that differ from the run's own, as `model: a → b`; those that shape no row may differ freely."""
    old, new = _flat(manifest.settings), _flat(config.public())
    found = [
        f"{_FLAGS.get(name, name)}: {_shown(old[name])} → {_shown(value)}"
        for name, value in new.items()
        if name in old and name not in FREE and old[name] != value and not _same_place(name, old[name], value)
    ]
    if config.seed is not None and config.seed != manifest.seed:
        found.append(f"seed: {manifest.seed} → {config.seed}")
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def _same_place(name: str, old: Any, new: Any) -> bool:
    """A server on this machine gets another port with each start; it is the same endpoint."""
    if name != "model.base_url":
        return False
    return all(is_loopback((urlsplit(str(url)).hostname or "").lower()) for url in (old, new))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _seconds(at: str) -> float:
    try:
        return datetime.datetime.fromisoformat(at).timestamp()
    except ValueError:
        return time.time()


def read_manifest(layout: Layout) -> Manifest | None:
    """The manifest of a directory; None where there is none (a directory of the reference).

    Raises:
        StoreError: there is one that cannot be read.
    """
    try:
        return msgspec.json.decode(layout.manifest.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(
            f"{layout.manifest} cannot be read: {error}.",
            "Restore it, or move it away: then a new one is made and the rows are taken over as they are.",
        ) from error


def write_manifest(layout: Layout, manifest: Manifest) -> None:
    """Replace `run.json`. Raises `StoreError`."""
    write_atomic(layout.manifest, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
