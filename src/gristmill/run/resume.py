"""What a run still owes: outcomes on record against the dataset, by prompt content, counting copies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from gristmill.errors import UsageError
from gristmill.run.index import TEXT_KEY, Damage, Slot
from gristmill.task import Task, text_digest
from gristmill.types import Outcome

# What else than outcomes `--retry` may name: all discards, and rows of the reference that it calls partial.
_RETRY_MORE = ("discarded", "partial")
_DONE = -1


class Owed(NamedTuple):
    """One session that is to be run; `attempt` counts from 1 over all invocations."""

    task: Task
    sample: int
    attempt: int


class Resume(msgspec.Struct, kw_only=True):
    """What a directory has and what it lacks.

    `sessions` is prompts × samples, `completed` of them count as done, `owed` are the others in dataset order.
    `completed_prompts` are prompts of which no sample is owed. `beyond` counts outcomes that the dataset does not ask
    for. `renamed` lists (key, sample, new key) of outcomes that take the place of another key's, or make room for it.
    """

    prompts: int
    samples: int
    sessions: int
    completed: int
    completed_prompts: int
    owed: list[Owed]
    beyond: int
    renamed: list[tuple[str, int, str]] = []
    damaged: list[Damage] = []


def match(tasks: Sequence[Task], samples: int, slots: Iterable[Slot], retry: Collection[str] = ()) -> Resume:
    """Find what is owed.

    An outcome settles the task of its own key first; what is left over settles copies of the same content, and lines
    without a key settle tasks with their text. So k finished copies finish k rows, wherever these stand now.

    Args:
        tasks: the dataset.
        samples: independent sessions of each task.
        slots: the outcomes on record.
        retry: outcomes that are run again although they settle their prompt.

    Raises:
        UsageError: `retry` names what is no outcome.
    """
    left = {(slot.key, slot.sample): slot for slot in slots}
    _check_retry(retry, left.values())
    recorded = len(left)
    attempts: list[int] = []  # of each task and sample so far; _DONE where nothing is owed
    for task in tasks:
        for sample in range(samples):
            slot = left.pop((task.key, sample), None)
            attempts.append(0 if slot is None else _DONE if _settles(slot, retry) else slot.attempts)

    spare = _spare(left.values())
    without_keys = any(digest.startswith(TEXT_KEY) for digest, _ in spare)
    owed: list[Owed] = []
    renamed: list[tuple[str, int, str]] = []
    pending = completed_prompts = 0
    position = 0
    for task in tasks:
        before = len(owed)
        for sample in range(samples):
            tried = attempts[position]
            position += 1
            if tried == _DONE:
                continue
            found = spare.get((task.digest, sample)) if spare else None
            if not found and without_keys:
                found = spare.get((TEXT_KEY + text_digest(task.text), sample))
            if found:
                slot = found.pop(0)
                again = not _settles(slot, retry)
                if again or tried:  # what replaces the other must have its key
                    renamed.append((slot.key, sample, task.key))
                    recorded -= tried > 0
                    tried += slot.attempts
                if not again:
                    continue
            pending += tried == 0
            owed.append(Owed(task, sample, tried + 1))
        completed_prompts += len(owed) == before
    sessions = len(tasks) * samples
    return Resume(
        prompts=len(tasks),
        samples=samples,
        sessions=sessions,
        completed=sessions - len(owed),
        completed_prompts=completed_prompts,
        owed=owed,
        beyond=recorded + pending - sessions,
        renamed=renamed,
    )


def _settles(slot: Slot, retry: Collection[str]) -> bool:
    """True where nothing more is owed for it."""
    if slot.state == "failed" or slot.outcome in retry:
        return False
    return not (slot.state == "discarded" and "discarded" in retry)


def _spare(slots: Iterable[Slot]) -> dict[tuple[str, int], list[Slot]]:
    """Settled outcomes of no task of the dataset, by content and sample."""
    spare: dict[tuple[str, int], list[Slot]] = {}
    for slot in slots:
        if slot.state != "failed":
            spare.setdefault((slot.key.partition("#")[0], slot.sample), []).append(slot)
    return spare


def _check_retry(retry: Collection[str], slots: Iterable[Slot]) -> None:
    known = {str(outcome) for outcome in Outcome} | set(_RETRY_MORE)
    unknown = [name for name in retry if name not in known]
    if unknown:
        known |= {slot.outcome for slot in slots if slot.state == "discarded"}  # names of filters
        unknown = [name for name in unknown if name not in known]
    if unknown:
        raise UsageError(f"--retry names no outcome: {', '.join(unknown)}.", f"Known are {', '.join(sorted(known))}.")
