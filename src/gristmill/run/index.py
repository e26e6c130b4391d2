"""A cache over the batch files, so that resume, status, merge and statistics of a million rows read none of them again.

`index.sqlite` holds one entry per complete line. Any process may bring it up to date, the owner of the run does so with
each group of rows. It is thrown away and built anew where it is missing, damaged, of another version, from another
directory (a copy taken while the run went on need not hold together), or does not fit the files; where the directory
cannot be written it is built in memory.

A line's place is one number: `batch << 38 | offset`. Its rank is the place, with a bit above it for lines that settle
their prompt, so the highest rank of a task and sample is the line that counts: the last trajectory or discard, or the
last failure where there is nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gristmill.errors import StoreError
from gristmill.row_summary import RowSummary, summarize
from gristmill.run.adopt import prompt_text
from gristmill.run.journal import Landed
from gristmill.run.layout import Layout
from gristmill.task import text_digest
from gristmill.trajectory import Row, decode_row, encode_row
from gristmill.types import Usage

TEXT_KEY = "text:"  # begins the key of a line that carries none: the digest of its prompt's text follows

_VERSION = 1
_OFFSET_BITS = 38
_SETTLED = 1 << 62
_BUSY_SECONDS = 60.0
_SCHEMA = """
CREATE TABLE home(inode INTEGER NOT NULL);
CREATE TABLE files(batch INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime INTEGER NOT NULL, lines INTEGER NOT NULL);
CREATE TABLE lines(place INTEGER PRIMARY KEY, length INTEGER NOT NULL, key TEXT NOT NULL, sample INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL, state TEXT NOT NULL, outcome TEXT NOT NULL, rank INTEGER NOT NULL,
    columns INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL NOT NULL,
    summary BLOB NOT NULL);
CREATE TABLE damage(batch INTEGER NOT NULL, line INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE columns(id INTEGER PRIMARY KEY, tools TEXT NOT NULL UNIQUE);
"""
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH}
_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}

_ROWS = msgspec.json.Decoder(Row)
_PACK = msgspec.msgpack.Encoder()
_UNPACK = msgspec.msgpack.Decoder(RowSummary)


class Slot(NamedTuple):
    """What the lines of one task and sample come to; `outcome` is the filter's name where it was discarded."""

    key: str
    sample: int
    state: str
    outcome: str
    attempts: int


class Indexed(NamedTuple):
    """One line. `columns` numbers its schema, 0 where it is not in the form that this version writes.

    `counts` is False where a later line of the same task and sample replaces it.
    """

    batch: int
    offset: int
    length: int
    columns: int
    counts: bool
    summary: RowSummary


class Damage(NamedTuple):
    """A line that is no outcome; `line` counts from 1."""

    file: str
    line: int
    reason: str


class Index:
    """The index of one run directory; used by one thread at a time."""

    def __init__(self, layout: Layout) -> None:
        """Open the index and bring it up to date. Raises `StoreError` where the batch files cannot be read."""
        self._layout = layout
        self._columns: dict[tuple[str, ...], int] = {}
        self._counting: tuple[int, int] | None = None
        try:
            self._database = self._open(str(layout.index))
            self.refresh()
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in _BROKEN | _UNWRITABLE:
                raise _failed(layout, error) from error
            if code in _BROKEN:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{layout.index}{suffix}").unlink(missing_ok=True)
            self._database = self._open(str(layout.index) if code in _BROKEN else ":memory:")
            self.refresh()

    def _open(self, path: str) -> sqlite3.Connection:
        # A commit need not reach the disk: what is lost is read from the batch files again.
        database = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        return database

    def close(self) -> None:
        """Idempotent."""
        self._database.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _failed(self._layout, error) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    # Filling

    def refresh(self) -> None:
        """Read what the batch files hold beyond the index; read all of them where the index does not fit."""
        with self._writing():
            files = self._layout.batches()
            known = self._known() if self._is_ours() else None
            if known is None or not self._fits(known, files):
                self._clear()
                known = {}
            for batch, status in files.items():
                begin, lines = known.get(batch, (0, 0, 0))[::2]
                if status.st_size > begin:
                    self._scan(batch, begin, lines)

    def _is_ours(self) -> bool:
        if self._database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            return False
        return bool(self._database.execute("SELECT inode FROM home").fetchall() == [(self._inode(),)])

    def _inode(self) -> int:
        return self._layout.root.stat().st_ino & _SETTLED - 1

    def _known(self) -> dict[int, tuple[int, int, int]]:
        return {row[0]: row[1:] for row in self._database.execute("SELECT batch, size, mtime, lines FROM files")}

    def _fits(self, known: Mapping[int, tuple[int, int, int]], files: Mapping[int, os.stat_result]) -> bool:
        for batch, (size, mtime, _) in known.items():
            now = files.get(batch)
            if now is None or now.st_size < size or (now.st_size == size and now.st_mtime_ns != mtime):
                return False
            if now.st_size > size > 0 and _byte_before(self._layout.batch(batch), size) != b"\n":
                return False
        return True

    def _clear(self) -> None:
        # Dropped inside the transaction, not unlinked: other processes may have the file open.
        names = self._database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
        for (name,) in names:
            self._database.execute(f'DROP TABLE "{name}"')
        for statement in _SCHEMA.split(";"):
            self._database.execute(statement)
        self._database.execute("INSERT INTO home VALUES(?)", (self._inode(),))
        self._database.execute(f"PRAGMA user_version={_VERSION}")
        self._columns = {}

    def _scan(self, batch: int, begin: int, lines: int) -> None:
        """Read the complete lines of a batch file from an offset on."""
        path = self._layout.batch(batch)
        damage: list[tuple[int, int, str]] = []
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(begin)
            offset = begin
            found: list[tuple[Any, ...]] = []
            while offset < status.st_size and (line := file.readline()).endswith(b"\n"):
                lines += 1
                if not line.isspace():
                    try:
                        found.append(self._entry(batch, offset, line))
                    except ValueError as error:
                        damage.append((batch, lines, str(error)))
                offset += len(line)
                if len(found) >= 1000:
                    self._insert(found)
                    found = []
        self._insert(found)
        self._database.executemany("INSERT INTO damage VALUES(?, ?, ?)", damage)
        self._set_file(batch, offset, status.st_mtime_ns, lines)

    def add(self, landed: Sequence[Landed]) -> None:
        """Take in a durable group. Raises `StoreError`."""
        with self._explained(), self._writing():
            self._add(landed)

    def _add(self, landed: Sequence[Landed]) -> None:
        batches: dict[int, list[Landed]] = {}
        for line in landed:
            batches.setdefault(line.batch, []).append(line)
        entries = []
        for batch, group in batches.items():
            size, _, lines = self._file(batch)
            new = [line for line in group if line.offset >= size]  # another process may have read the others already
            if new and new[0].offset != size:
                self._scan(batch, size, lines)
                continue
            entries += [self._entry(batch, line.offset, line.row) for line in new]
            size += sum(len(line.row) for line in new)
            self._set_file(batch, size, self._layout.batch(batch).stat().st_mtime_ns, lines + len(new))
        self._insert(entries)

    def torn(self) -> list[int]:
        """Batch files that hold more than complete lines."""
        known = self._known()
        files = self._layout.batches().items()
        return [batch for batch, status in files if status.st_size > known.get(batch, (0,))[0]]

    def accept(self, batch: int) -> None:
        """Take a batch file as it is where only its time differs: its torn tail, which is not indexed, was cut."""
        status = self._layout.batch(batch).stat()
        self._database.execute(
            "UPDATE files SET mtime=? WHERE batch=? AND size=?", (status.st_mtime_ns, batch, status.st_size)
        )

    def rename(self, slots: Sequence[tuple[str, int, str]]) -> None:
        """Give lines of a key and sample another key, in the order given; see `Manifest.renamed`."""
        if not slots:
            return
        last: dict[tuple[str, int], str] = {}
        for key, sample, new in reversed(slots):
            last[key, sample] = last.get((new, sample), new)
        with self._explained(), self._writing() as database:
            database.execute(
                "CREATE TEMP TABLE renamed(key TEXT, sample INTEGER, new TEXT, PRIMARY KEY(key, sample)) WITHOUT ROWID"
            )
            database.executemany("INSERT INTO renamed VALUES(?, ?, ?)", ((*slot, new) for slot, new in last.items()))
            database.execute(
                "UPDATE lines SET key = r.new FROM renamed r WHERE r.key = lines.key AND r.sample = lines.sample"
            )
            database.execute("DROP TABLE renamed")

    def _file(self, batch: int) -> tuple[int, int, int]:
        row = self._database.execute("SELECT size, mtime, lines FROM files WHERE batch=?", (batch,)).fetchone()
        return row or (0, 0, 0)

    def _set_file(self, batch: int, size: int, mtime: int, lines: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO files VALUES(?, ?, ?, ?)", (batch, size, mtime, lines))

    def _insert(self, entries: Iterable[tuple[Any, ...]]) -> None:
        self._database.executemany("INSERT INTO lines VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", entries)

    def _entry(self, batch: int, offset: int, line: bytes) -> tuple[Any, ...]:
        """The values of one line. Raises `ValueError` where it is no outcome."""
        summary = summarize(line)
        place = batch << _OFFSET_BITS | offset
        usage = summary.usage or Usage()
        return (
            place,
            len(line),
            summary.task_key or f"{TEXT_KEY}{text_digest(prompt_text(decode_row(line)))}#{place}",
            summary.sample,
            summary.prompt_index,
            summary.state,
            summary.discarded or summary.outcome,
            place if summary.state == "failed" else place | _SETTLED,
            self._columns_of(line) if summary.state == "kept" else 0,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cost_usd,
            _PACK.encode(summary),
        )

    def _columns_of(self, line: bytes) -> int:
        try:
            row = _ROWS.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            return 0
        # Equal to the last byte, else a merge that copies the line could bring a second schema into its file.
        return self.columns_id(tuple(row.tool_stats)) if encode_row(row) == line else 0

    def columns_id(self, tools: tuple[str, ...]) -> int:
        """The number of the schema that has these tools in this order."""
        known = self._columns.get(tools)
        if known is None:
            text = msgspec.json.encode(tools).decode()
            self._database.execute("INSERT OR IGNORE INTO columns(tools) VALUES(?)", (text,))
            known = self._database.execute("SELECT id FROM columns WHERE tools=?", (text,)).fetchone()[0]
            self._columns[tools] = known
        return int(known)

    # Reading

    def _read(self, query: str, values: tuple[int, ...] = ()) -> Iterator[tuple[Any, ...]]:
        with self._explained():
            yield from self._database.execute(query, values)

    def slots(self) -> Iterator[Slot]:
        """What the lines of each task and sample come to, in no order."""
        # With a single MAX, SQLite takes the other columns from the row that has it.
        rows = self._read("SELECT key, sample, state, outcome, COUNT(*), MAX(rank) FROM lines GROUP BY key, sample")
        for *slot, _ in rows:
            yield Slot(*slot)

    def lines(self) -> Iterator[Indexed]:
        """All lines, by number of their batch file and then in file order."""
        with self._explained():
            self._mark_counting()
        rows = self._read(
            "SELECT l.place, l.length, l.columns, c.place IS NOT NULL, l.summary"
            " FROM lines l LEFT JOIN counting c ON c.place = l.place ORDER BY l.place"
        )
        for place, length, columns, counts, summary in rows:
            batch, offset = divmod(place, 1 << _OFFSET_BITS)
            yield Indexed(batch, offset, length, columns, bool(counts), _UNPACK.decode(summary))

    def _mark_counting(self) -> None:
        """Fill a table of this connection with the places of the lines that count, unless it is up to date."""
        if self._counting == self._state():
            return
        self._database.execute("DROP TABLE IF EXISTS temp.counting")
        # The declared type matters: without it the join below cannot use the key.
        self._database.execute("CREATE TEMP TABLE counting(place INTEGER PRIMARY KEY)")
        self._database.execute(
            "INSERT INTO counting SELECT MAX(rank) & ? FROM lines GROUP BY key, sample", (_SETTLED - 1,)
        )
        self._counting = self._state()

    def _state(self) -> tuple[int, int]:
        """Changes with every change of the database, by this connection or another one."""
        return self._database.execute("PRAGMA data_version").fetchone()[0], self._database.total_changes

    def spent(self) -> Usage:
        """Tokens and money of all sessions, those that came to nothing included."""
        totals = self._read("SELECT TOTAL(prompt_tokens), TOTAL(completion_tokens), TOTAL(cost) FROM lines")
        ((prompt, completion, cost),) = totals
        return Usage(prompt_tokens=int(prompt), completion_tokens=int(completion), cost_usd=cost)

    def settled(self) -> bool:
        """True where any line settles its prompt."""
        return bool(list(self._read("SELECT 1 FROM lines WHERE state != 'failed' LIMIT 1")))

    def damage(self) -> list[Damage]:
        """Lines that are no outcome."""
        rows = self._read("SELECT batch, line, reason FROM damage ORDER BY batch, line")
        return [Damage(self._layout.batch(batch).name, line, reason) for batch, line, reason in rows]

    def batch_counts(self) -> list[tuple[int, int, int]]:
        """For each batch: its number, settled lines, and those of them that `no_reasoning` discarded."""
        rows = self._read(
            "SELECT place >> ?, COUNT(*), SUM(state = 'discarded' AND outcome = 'no_reasoning')"
            " FROM lines WHERE state != 'failed' GROUP BY 1 ORDER BY 1",
            (_OFFSET_BITS,),
        )
        return list(rows)


def _byte_before(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1)


def _failed(layout: Layout, error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"The index {layout.index} failed: {error}.",
        "It is only a cache: make room on the disk or delete it, then continue with --resume.",
    )
