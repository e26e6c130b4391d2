"""Appends to the batch files, durably and in groups; and mends what a crash left at their ends.

What is waiting while one group is on its way to the disk makes the next group: one flush serves many sessions, and a
lone session waits for nothing. A session's record goes to the disk before its row, so a row never lacks its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import StoreError
from gristmill.run.atomic import disk_error, sync_directory, write_atomic
from gristmill.run.layout import Layout, aside_name
from gristmill.trajectory import decode_row

GROUP_SECONDS = 0.025  # a group starts at least this long after the one before it
GROUP_LIMIT = 128  # sessions in one group, and so files open at once
_FLUSHES = 8  # at a time: the file system joins them, so eight take little longer than one
_BLOCK = 1 << 16


class Entry(NamedTuple):
    """What one session leaves: a line, newline included, and a zstd frame."""

    batch: int
    row: bytes
    record: bytes


class Landed(NamedTuple):
    """A line that is durable, and where it stands in its batch file."""

    batch: int
    offset: int
    row: bytes


class Journal:
    """Appends for one owner of a run directory. `landed` is called in the writing thread with each durable group."""

    def __init__(self, layout: Layout, landed: Callable[[Sequence[Landed]], None]) -> None:
        self._layout = layout
        self._landed = landed
        self._waiting: list[tuple[Entry, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gristmill-journal")
        self._flushers = ThreadPoolExecutor(max_workers=_FLUSHES, thread_name_prefix="gristmill-flush")
        self._last = 0.0
        self._broken: StoreError | None = None

    async def append(self, batch: int, row: bytes, record: bytes) -> None:
        """Return once row and record are on the disk, at most about 100 ms later. A cancelled caller loses nothing.

        Raises:
            StoreError: the disk does not take it. Nothing is written from then on; what was, is intact.
        """
        self._check()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((Entry(batch, row, record), done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(done)

    def close(self) -> None:
        """End the writing threads; what they have begun is finished first. Idempotent."""
        self._thread.shutdown(wait=True)
        self._flushers.shutdown(wait=True)

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreError(self._broken.message, self._broken.mend)

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._broken is None:
            await asyncio.sleep(self._last + GROUP_SECONDS - loop.time())
            self._last = loop.time()
            group, self._waiting = self._waiting[:GROUP_LIMIT], self._waiting[GROUP_LIMIT:]
            error: StoreError | None = StoreError("The writing of rows was broken off.", "Continue with --resume.")
            try:
                await loop.run_in_executor(self._thread, self._write, [entry for entry, _ in group])
                error = None
            except StoreError as refused:
                error = refused
            finally:  # whatever happened, nobody waits for ever
                self._broken = error
                for _, done in group if error is None else group + self._waiting:
                    self._answer(done, error)

    @staticmethod
    def _answer(done: asyncio.Future[None], error: StoreError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(StoreError(error.message, error.mend))
            done.exception()  # a caller that was cancelled never looks at it

    def _write(self, group: Sequence[Entry]) -> None:
        self._landed(append_group(self._layout, group, self._flushers.map))


# Calls a function for each item; the builtin `map`, or a pool's.
_Map = Callable[[Callable[["_Open"], StoreError | None], Iterable["_Open"]], Iterable[StoreError | None]]


def append_group(layout: Layout, group: Sequence[Entry], each: _Map = map) -> list[Landed]:
    """Append the entries of a group, records first, and make them durable; `each` flushes the files.

    Raises:
        StoreError: the disk does not take them. The file at fault is back at its old length.
    """
    batches: dict[int, list[Entry]] = {}
    for entry in group:
        batches.setdefault(entry.batch, []).append(entry)
    records = {layout.sessions(n): b"".join(e.record for e in entries) for n, entries in batches.items()}
    rows = {layout.batch(n): b"".join(e.row for e in entries) for n, entries in batches.items()}
    offsets = _append(records, each) + (begins := _append(rows, each))
    if 0 in offsets:
        try:
            sync_directory(layout.root)
        except OSError as error:
            raise disk_error(layout.root, error) from error
    landed: list[Landed] = []
    for entries, offset in zip(batches.values(), begins, strict=True):
        for entry in entries:
            landed.append(Landed(entry.batch, offset, entry.row))
            offset += len(entry.row)
    return landed


class _Open(NamedTuple):
    path: Path
    descriptor: int
    size: int  # before anything was appended


def _append(files: Mapping[Path, bytes], each: _Map) -> list[int]:
    """Append to each file durably; the offsets at which the new data begins."""
    opened: list[_Open] = []
    try:
        for path, data in files.items():
            opened.append(_open(path))
            _write(opened[-1], data)
        errors = [error for error in each(_flush, opened) if error is not None]
        if errors:
            raise errors[0]
    finally:
        for file in opened:
            os.close(file.descriptor)
    return [file.size for file in opened]


def _open(path: Path) -> _Open:
    # Opened anew each time: a descriptor costs microseconds, a flush a thousand times as much.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(path, error) from error
    return _Open(path, descriptor, os.fstat(descriptor).st_size)


def _write(file: _Open, data: bytes) -> None:
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file.descriptor, left) :]
    except OSError as error:
        raise _take_back(file, error) from error


def _flush(file: _Open) -> StoreError | None:
    try:
        os.fdatasync(file.descriptor)
    except OSError as error:
        return _take_back(file, error)
    return None


def _take_back(file: _Open, error: OSError) -> StoreError:
    """Cut what was appended, so that no half line stays; where that fails too, the next start does it."""
    with contextlib.suppress(OSError):
        os.ftruncate(file.descriptor, file.size)
    return disk_error(file.path, error)


def mend_tail(path: Path) -> str:
    """Make a batch file end with a complete line, and say what was done; empty where nothing was amiss.

    A complete record that lacks only its newline is kept. Anything else behind the last newline is moved to a file of
    its own. Raises `StoreError` where the disk does not take it.
    """
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = _after_last_newline(file.fileno(), size)
            if start == size:
                return ""
            tail = os.pread(file.fileno(), size - start, start)
            record = tail.rstrip(b"\0")  # a crash of the machine may leave zeros behind what was written
            if _is_record(record):
                file.seek(start + len(record))
                file.write(b"\n")
                said = f"{path.name}: the last line lacked its newline, which was added."
            else:
                kept = aside_name(path, "torn")
                write_atomic(kept, tail)
                file.seek(start)
                said = (
                    f"{path.name}: a torn last line of {len(tail)} bytes was cut off and kept as {kept.name}; "
                    "its prompt runs again."
                )
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            return said
    except OSError as error:
        raise disk_error(path, error) from error


def _after_last_newline(descriptor: int, size: int) -> int:
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        at = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def _is_record(line: bytes) -> bool:
    try:
        decode_row(line)
    except ValueError:
        return False
    return True
