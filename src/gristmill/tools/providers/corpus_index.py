"""The index of a corpus: one SQLite file outside the folder, built once, shared by all workers and runs.

```
<cache>/<folder>-<content>.sqlite   folder: digest of its path · content: digest of each file's path, size and mtime
<cache>/<folder>-<content>.lock     held by whoever builds it; the others wait
```

It is built under a temporary name and renamed, so that nobody sees half of one. A changed folder has another name; the
index of what it was is removed then. Who has one open keeps it: a run sees the folder as it was at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from gristmill.tools.extract import Job, Page, Unreadable
from gristmill.tools.extract_pool import ExtractPool

FORMAT = 1  # of the index; another number makes another file
DOCUMENT_LIMIT = 20_000_000  # bytes; a larger file is left out
TYPES = {
    ".html": "text/html",
    ".htm": "text/html",
    ".xhtml": "text/html",
    ".txt": "text/plain",
    ".text": "text/plain",
    ".md": "text/markdown",
    ".rst": "text/plain",
    ".csv": "text/csv",
    ".json": "application/json",
    ".pdf": "application/pdf",
}
_AT_ONCE = 32  # documents read and written together
# Words of the path and above all of the title weigh more than those of the text.
_QUERY = """
SELECT path, title, snippet(documents, 2, '', '', ' … ', 40) FROM documents
WHERE documents MATCH ? ORDER BY bm25(documents, 2.0, 4.0, 1.0), path LIMIT ?
"""


@dataclass
class CorpusIndex:
    """An open index. `paths` are its documents, relative to `directory`, with `/` between."""

    directory: Path
    paths: frozenset[str]
    _db: sqlite3.Connection
    _lock: threading.Lock

    def search(self, match: str, limit: int) -> list[tuple[str, str, str]]:
        """(path, title, snippet) of the best documents for an FTS5 expression; blocks for some milliseconds."""
        with self._lock:
            return self._db.execute(_QUERY, (match, limit)).fetchall()

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._db.close()


async def open_index(directory: Path, cache: Path, pages: ExtractPool, limit: int = DOCUMENT_LIMIT) -> CorpusIndex:
    """The index of a folder, built first where nobody has.

    Building reads each document once, some milliseconds for an HTML page.
    Raises `OSError` and `sqlite3.Error` where the folder cannot be read or the cache not be written.
    """
    documents = await asyncio.to_thread(_documents, directory, limit)
    if not documents:
        raise FileNotFoundError(f"there are no documents ({', '.join(TYPES)}) in {directory}")
    content = hashlib.sha256(repr((FORMAT, documents)).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    file = cache / f"{folder}-{content}.sqlite"
    paths = [path for path, _, _ in documents]
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with _only_one(file.with_suffix(".lock")):
            if not file.exists():
                await _build(file, directory, paths, pages)
                for old in cache.glob(f"{folder}-*.*"):
                    if old.stem != file.stem:
                        old.unlink(missing_ok=True)
    db = sqlite3.connect(f"{file.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    return CorpusIndex(directory, frozenset(paths), db, threading.Lock())


def _documents(directory: Path, limit: int) -> list[tuple[str, int, int]]:
    """(path, size, mtime in ns) of each document, in order of the paths; nothing hidden, no link that leads outside."""
    found: list[tuple[str, int, int]] = []
    for place, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            file = Path(place, name)
            if name.startswith(".") or file.suffix.lower() not in TYPES:
                continue
            if file.is_symlink() and not file.resolve().is_relative_to(directory):
                continue
            path = file.relative_to(directory).as_posix()
            # A link to nothing, a file that has gone since, a name that is no Unicode and so fits no URL.
            with contextlib.suppress(FileNotFoundError, UnicodeEncodeError):
                path.encode()
                status = file.stat()
                if 0 < status.st_size <= limit and stat.S_ISREG(status.st_mode):
                    found.append((path, status.st_size, status.st_mtime_ns))
    return sorted(found)


async def _build(file: Path, directory: Path, paths: list[str], pages: ExtractPool) -> None:
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # of a builder that was killed
    db = sqlite3.connect(partial, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute(
            "CREATE VIRTUAL TABLE documents USING"
            " fts5(path, title, body, tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        for start in range(0, len(paths), _AT_ONCE):
            some = paths[start : start + _AT_ONCE]
            read = await asyncio.gather(*(_read(directory / path, pages) for path in some))
            rows = [(path, page.title, page.content) for path, page in zip(some, read, strict=True) if page]
            await asyncio.to_thread(_insert, db, rows)
        await asyncio.to_thread(db.execute, "INSERT INTO documents(documents) VALUES ('optimize')")
        db.commit()
    finally:
        db.close()
    partial.replace(file)


async def _read(file: Path, pages: ExtractPool) -> Page | None:
    try:
        body = await asyncio.to_thread(file.read_bytes)
        return await pages.read(Job(body=body, content_type=TYPES[file.suffix.lower()], plain=True))
    except (OSError, Unreadable):
        return None  # not searchable; web_extract says why to whoever asks for it


def _insert(db: sqlite3.Connection, rows: Iterable[tuple[str, str, str]]) -> None:
    db.executemany("INSERT INTO documents VALUES (?, ?, ?)", rows)


@contextlib.asynccontextmanager
async def _only_one(lock: Path) -> AsyncIterator[None]:
    """Hold a lock file; the system gives it back whatever becomes of this process."""
    with lock.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)
        yield
