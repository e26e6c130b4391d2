"""What a run tells its listeners: small facts, in the order in which they happen. A listener only looks.

```
RunPlanned → (Resumed | AllDone)?
           → (BatchStarted | SessionEnded | BatchCompleted | Progress | Warned | Paused | Unpaused)*
           → Stopping? → Merging → Filtered* → RunEnded
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gristmill.config import RunConfig, without_credentials
from gristmill.task import Dataset


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class RunPlanned(Event, frozen=True, kw_only=True):
    """The run as it is about to start: the figures of the summary.

    `rows` counts all rows of the dataset that are not blank, `refused` those that cannot be run, with `line 7: reason`
    for each in `refusals`. `sessions` is usable rows × samples.
    """

    dataset: str
    rows: int
    refused: int
    refusals: tuple[str, ...]
    sessions: int
    samples: int
    batch_size: int
    batches: int
    run_name: str
    distribution: str
    output_dir: str
    workers: int
    concurrency: int
    seed: int | None  # None: not drawn yet
    model: str
    endpoint: str  # without credentials
    sandbox: str
    filters: tuple[str, ...]
    max_turns: int

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset, *, batches: int, seed: int | None, directory: str) -> RunPlanned:
        """The figures of a run with these settings over this dataset."""
        return cls(
            dataset=config.dataset_file,
            rows=dataset.rows,
            refused=len(dataset.refused),
            refusals=tuple(f"line {row.line}: {row.reason}" for row in dataset.refused),
            sessions=len(dataset.tasks) * config.samples_per_prompt,
            samples=config.samples_per_prompt,
            batch_size=config.batch_size,
            batches=batches,
            run_name=config.run_name,
            distribution=config.distribution,
            output_dir=directory,
            workers=config.num_workers,
            concurrency=config.sessions_in_flight,
            seed=seed,
            model=config.model.name,
            endpoint="" if config.model.local else without_credentials(config.model.base_url),
            sandbox=config.sandbox.kind,
            filters=config.filters,
            max_turns=config.max_turns,
        )


class Resumed(Event, frozen=True, kw_only=True):
    """What a resumed run found: prompts of the dataset, sessions that count as done, sessions owed, new batches.

    `changes` lists settings that differ from the run's own and were allowed, as `model: a → b`.
    """

    prompts: int
    completed: int
    owed: int
    new_batches: int
    changes: tuple[str, ...] = ()


class AllDone(Event, frozen=True, kw_only=True):
    """Nothing is owed: no model call follows, the merge and the statistics do."""


class BatchStarted(Event, frozen=True, kw_only=True):
    """The first session of a batch starts."""

    batch: int
    prompts: int


class BatchCompleted(Event, frozen=True, kw_only=True):
    """Every session of a batch has ended."""

    batch: int
    prompts: int


class SessionEnded(Event, frozen=True, kw_only=True):
    """One session has ended and its row is on disk. `reason` says why it was discarded or failed, empty for a kept one.

    `seconds` is wall time. `cost_known` False: a part of the session has no price.
    """

    prompt_index: int
    sample: int
    batch: int
    state: Literal["kept", "discarded", "failed"]
    outcome: str
    partial: bool = False
    reason: str = ""
    prompt: str = ""  # its beginning, for previews
    turns: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    cost_known: bool = True


class Progress(Event, frozen=True, kw_only=True):
    """Sessions in flight now, how many requests the endpoint takes at present (0: unknown), and how many it refused."""

    in_flight: int
    limit: int
    refused: int = 0


class Warned(Event, frozen=True, kw_only=True):
    """Something the user should know; one sentence. Sent once per matter."""

    text: str


class Paused(Event, frozen=True, kw_only=True):
    """No new turn starts until `Unpaused`: an empty account, say. `seconds` is the longest that it may last."""

    reason: str
    seconds: float


class Unpaused(Event, frozen=True, kw_only=True):
    """The reason of the pause is gone."""


class Stopping(Event, frozen=True, kw_only=True):
    """The run stops early and cleanly; sessions in flight are ended and stay owed."""

    reason: str


class Merging(Event, frozen=True, kw_only=True):
    """The batch files are being merged."""

    files: int


class Filtered(Event, frozen=True, kw_only=True):
    """A merge filter left a row out. `reason` is the filter's own, `invalid tool 'x'` for instance."""

    batch: int
    filter: str
    reason: str


class RunEnded(Event, frozen=True, kw_only=True):
    """The end: figures of this invocation, of the merge, and of the whole run (`statistics` is statistics.json).

    `sessions` is the whole run's prompts × samples = `kept` + `discarded` + `filtered` + `failed` + `pending`.
    """

    processed: int  # sessions that ended in this invocation
    seconds: float  # of this invocation
    sessions: int
    kept: int
    discarded: int
    filtered: int
    failed: int
    pending: int
    merged_rows: int
    merged_files: int
    directory: str
    files: tuple[str, ...]  # names of what was written, in the order of the run directory
    statistics: dict[str, Any]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run returns. `exit_status` is that of the command line.

    `error` and `mend` say what ended the run early; both are empty where nothing did.
    """

    exit_status: int
    statistics: dict[str, Any]
    error: str = ""
    mend: str = ""


Listener = Callable[[Event], None]
