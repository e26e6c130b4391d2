"""The run directory of one invocation, from its opening to its last file: open → owed → append … → finalize → close.

The runner's process alone has one. What is on record is in the batch files; everything else here is made from them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence

from gristmill import events
from gristmill.config import RunConfig
from gristmill.errors import RunConflict, StoreError
from gristmill.quality.base import ActiveFilter
from gristmill.run.adopt import tools_of_rows
from gristmill.run.atomic import disk_error, sweep_temporaries, write_atomic
from gristmill.run.checkpoint import Checkpoint, check_checkpoint
from gristmill.run.index import Index
from gristmill.run.journal import Journal, Landed, mend_tail
from gristmill.run.layout import Layout, set_aside
from gristmill.run.lock import Lock
from gristmill.run.manifest import (
    Manifest,
    begin_invocation,
    changed_settings,
    dataset_facts,
    end_invocation,
    new_manifest,
    read_manifest,
    versions,
    write_manifest,
)
from gristmill.run.merge import MergeReport, merge
from gristmill.run.resume import Owed, Resume, match
from gristmill.session.spec import Finished
from gristmill.task import Dataset, Task
from gristmill.types import Usage

__all__ = ["Owed", "Resume", "RunStore"]

_NOTED = 20  # unreadable lines that are named one by one


class RunStore:
    """One invocation's hold on a run directory; made by `open`, given back by `close`.

    `changes` lists settings that differ from the run's earlier ones and were allowed, as `model: a → b`. `notes` are
    sentences for the user about what was found and mended. `resumed` is True where there were outcomes.
    """

    def __init__(
        self,
        layout: Layout,
        lock: Lock,
        index: Index,
        manifest: Manifest,
        *,
        filters: Sequence[ActiveFilter],
        changes: Sequence[str],
        notes: Sequence[str],
        resumed: bool,
    ) -> None:
        """Of a directory that is owned and in order; `open` is the way in."""
        self.layout = layout
        self.manifest = manifest
        self.changes = tuple(changes)
        self.notes = tuple(notes)
        self.resumed = resumed
        self._lock = lock
        self._index = index
        self._index_follows = True
        self._filters = tuple(filters)
        self._journal = Journal(layout, self._landed)
        self._checkpoint: Checkpoint | None = None
        self._checkpointing = asyncio.Lock()

    @classmethod
    def open(
        cls,
        config: RunConfig,
        dataset: Dataset,
        *,
        known_tools: Sequence[str],
        resume: bool = False,
        allow_changes: bool = False,
        filters: Sequence[ActiveFilter] = (),
    ) -> RunStore:
        """Make or take over the directory of a run, and own it.

        Args:
            config: the settings of this invocation.
            dataset: its dataset; it may have changed since the last one.
            known_tools: the columns of `tool_stats`, in order.
            resume: continue what the directory holds.
            allow_changes: accept settings that differ from those of its rows.
            filters: what the merge applies.

        Raises:
            RunLocked: another process owns the directory.
            RunConflict: it holds outcomes and `resume` is off, or settings differ that may not.
            StoreError: it cannot be read or written.
        """
        layout = Layout.of(config.output_dir, config.run_name)
        try:
            layout.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(layout.root, error) from error
        with contextlib.ExitStack() as undo:
            lock = Lock(layout.lock)
            undo.callback(lock.release)
            resumed = layout.holds_outcomes()
            if resumed and not resume:
                raise RunConflict(
                    f"The run directory {layout.root} already holds outcomes.",
                    "Continue that run with --resume, or start another one with a different --run_name.",
                )
            earlier = read_manifest(layout) if resumed else None
            index = Index(layout)
            undo.callback(index.close)
            manifest = earlier or new_manifest(config, dataset, known_tools)
            changed: list[str] = []
            if earlier is not None:
                # Where nothing but failures is on record, no row can disagree with another one.
                changed = _take_settings(earlier, config, allowed=allow_changes or not index.settled())
                earlier.known_tools = list(dict.fromkeys((*earlier.known_tools, *known_tools)))
                earlier.dataset = dataset_facts(config, dataset)
            elif resumed:
                manifest.made_by = "reference"
                manifest.adopted_tools = [name for name in tools_of_rows(layout) if name not in known_tools]
            notes = _tidy(layout, index, config.run_name)
            last_row = max((status.st_mtime for status in layout.batches().values()), default=0.0)
            begin_invocation(manifest, changed, last_row)
            write_manifest(layout, manifest)
            index.rename(manifest.renamed)
            store = cls(layout, lock, index, manifest, filters=filters, changes=changed, notes=notes, resumed=resumed)
            undo.pop_all()
            return store

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.manifest.seed

    @property
    def run_id(self) -> str:
        """A name of the run that no other run has; labels its sandboxes."""
        return self.manifest.run_id

    @property
    def next_batch(self) -> int:
        """The number of the first new batch."""
        return self.layout.next_batch()

    @property
    def spent(self) -> Usage:
        """What the run has used so far, failed and discarded sessions included."""
        return self._index.spent()

    def calls(self) -> int:
        """Model answers that the run has used so far; reads all lines of the index."""
        return sum(line.summary.api_calls for line in self._index.lines())

    def owed(self, tasks: Sequence[Task], samples: int, retry: Collection[str] = ()) -> Resume:
        """What is left to run. Asked once, before the first `append`.

        Raises:
            UsageError: `retry` names what is no outcome.
        """
        found = match(tasks, samples, self._index.slots(), retry)
        found.damaged = self._index.damage()
        if found.renamed:
            self._index.rename(found.renamed)
            self.manifest.renamed += found.renamed
        self.manifest.dataset.beyond = found.beyond
        write_manifest(self.layout, self.manifest)
        left = {task.index: 0 for task in tasks}
        for item in found.owed:
            left[item.task.index] += 1
        self._checkpoint = Checkpoint(self.manifest.run_name, left.items(), self._index.batch_counts())
        return found

    async def append(self, finished: Finished) -> None:
        """Put an ended session on record; returns when it is durable.

        Raises:
            StoreError: the disk does not take it. Nothing is written from then on.
        """
        await self._journal.append(finished.batch, finished.row, finished.record)
        if self._checkpoint is None or finished.state == "failed":
            return
        # A tombstone names the filter that made it; only the reference's own is counted in the checkpoint.
        no_reasoning = finished.state == "discarded" and b'"discarded":"no_reasoning"' in finished.row
        self._checkpoint.note(finished.prompt_index, finished.batch, no_reasoning=no_reasoning)
        async with self._checkpointing:
            if self._checkpoint.due:
                data = self._checkpoint.encode()
                with contextlib.suppress(StoreError):  # the row is safe; a full disk shows at the next one
                    await asyncio.to_thread(write_atomic, self.layout.checkpoint, data)

    def _landed(self, landed: Sequence[Landed]) -> None:
        if self._index_follows:
            try:
                self._index.add(landed)
            except StoreError:  # only a cache: `finalize` reads what it lacks
                self._index_follows = False

    def finalize(
        self,
        listen: Callable[[events.Event], None] | None = None,
        seconds: float = 0.0,
        reason: str = "finished",
    ) -> MergeReport:
        """Merge, compute the statistics, and close the books of this invocation. Every `append` has returned.

        Args:
            listen: told of `Merging` and of each row that a filter leaves out.
            seconds: wall time of this invocation.
            reason: why it ended.

        Raises:
            StoreError: the disk does not take it; what was written before stays.
        """
        end_invocation(self.manifest, seconds, reason)
        write_manifest(self.layout, self.manifest)
        if self._checkpoint is not None:
            write_atomic(self.layout.checkpoint, self._checkpoint.encode())
        if not self._index_follows:
            self._index.close()
            self._index = Index(self.layout)
            self._index.rename(self.manifest.renamed)
        return merge(self.layout, self._index, self.manifest, self._filters, listen)

    def close(self) -> None:
        """Give the directory back; idempotent. An invocation that was not finalized stays open in `run.json`."""
        self._journal.close()
        self._index.close()
        self._lock.release()


def _take_settings(manifest: Manifest, config: RunConfig, *, allowed: bool) -> list[str]:
    """Enter the settings of a new invocation, and list those that differ. Raises `RunConflict` where they may not."""
    found = changed_settings(manifest, config)
    if found and not allowed:
        raise RunConflict(
            f"The settings of the run {config.run_name} have changed: {'; '.join(found)}.",
            "Give the old ones, or --allow_changes to go on with the new ones, or choose another --run_name.",
        )
    manifest.settings = config.public()
    manifest.model, manifest.distribution = config.model.name, config.distribution
    manifest.versions = versions()
    if config.seed is not None:
        manifest.seed = config.seed
    return found


def _tidy(layout: Layout, index: Index, run_name: str) -> list[str]:
    """Put in order what a crash or a stranger left, and say what was found."""
    sweep_temporaries(layout.root)
    notes = [check_checkpoint(layout, run_name)]
    torn = index.torn()
    for batch in torn:
        notes.append(mend_tail(layout.batch(batch)))
        index.accept(batch)
    if torn:
        index.refresh()
    if layout.holds_outcomes() and not layout.batches():
        kept = set_aside(layout.trajectories, "earlier")
        notes.append(f"There are no batch files, so trajectories.jsonl cannot be made again; kept as {kept.name}.")
    damage = index.damage()
    notes += [f"{fault.file} line {fault.line} is unreadable ({fault.reason})." for fault in damage[:_NOTED]]
    if len(damage) > _NOTED:
        notes.append(f"{len(damage) - _NOTED} more lines are unreadable.")
    return [note for note in notes if note]
