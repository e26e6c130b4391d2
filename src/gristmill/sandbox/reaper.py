"""Where sandboxes keep their files on this machine, and how a later run finds what a killed one left.

```
<temporary directory>/
└── gristmill-<uid>-<token>/   one worker, mode 0700, locked (flock) as long as the worker lives
    └── s-<n>/                 one sandbox
/dev/shm/
└── gristmill-<uid>-<token>/   the same for the small files of every command, where the machine has room for them:
    └── s-<n>/                 on a busy disk making one costs a millisecond of CPU
```
The first one's token is also the beginning of the mark that a sandbox without namespaces puts on its processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gristmill.sandbox.process import kill_marked

MARK = "SBX_CALL"  # environment variable of every command: which call it belongs to
MEMORY = Path("/dev/shm")
MEMORY_FREE = 256 << 20  # bytes that must be free there; a container often has 64 MiB in all


class WorkerPlace:
    """One worker's directories. Making it removes what dead workers of the same user left.

    Args:
        root: where to make one for all; the system's temporary directory, and memory for small files, if None.
    """

    def __init__(self, root: Path | None = None) -> None:
        reap(root)
        self.path, lock = claim(root or Path(tempfile.gettempdir()))
        self._held = {self.path: lock}
        self._memory = self.path
        if root is None and _has_room(MEMORY):
            self._memory, lock = claim(MEMORY)
            self._held[self._memory] = lock
        self.token = self.path.name.removeprefix(prefix())
        self._numbers = itertools.count(1)

    def session(self) -> tuple[Path, Path]:
        """New directories for one sandbox: for what it holds, and for its small files; they may be the same."""
        name = f"s-{next(self._numbers)}"
        paths = self.path / name, self._memory / name
        for path in set(paths):
            path.mkdir(mode=0o700)
        return paths

    def close(self) -> None:
        """Remove them with all that is in them; idempotent."""
        while self._held:
            path, lock = self._held.popitem()
            remove_tree(path)
            os.close(lock)


def reap(root: Path | None = None) -> int:
    """Remove what workers of this user that are no more left behind, and end marked processes of theirs.

    Never touches a directory whose owner lives, or anyone else's. Returns the number of directories.
    """
    reaped = 0
    for path, lock in dead((root,) if root else (Path(tempfile.gettempdir()), MEMORY)):
        try:
            kill_marked(MARK, path.name.removeprefix(prefix()) + ".")
            remove_tree(path)
            reaped += 1
        finally:
            os.close(lock)
    return reaped


def dead(roots: tuple[Path, ...]) -> Iterator[tuple[Path, int]]:
    """Directories of workers that are no more, each with a descriptor that holds its lock and is to be closed."""
    for root in roots:
        for path in root.glob(prefix() + "*"):
            lock = _lock(path)
            if lock >= 0:
                yield path, lock


def claim(root: Path) -> tuple[Path, int]:
    """A new directory of ours, and the descriptor that holds its lock. Raises `OSError`."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix(), dir=root))
        lock = _lock(path)
        if lock >= 0:
            return path, lock
        # Another worker took it for a dead one's in this very moment, and removes it.


def _has_room(memory: Path) -> bool:
    try:
        found = os.statvfs(memory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= MEMORY_FREE and os.access(memory, os.W_OK)


def remove_tree(top: Path) -> None:
    """Remove a directory that a sandbox wrote to, whatever modes, names and depths it holds. Best effort, never raises.

    Each directory is moved to the top before it is emptied, so neither the call stack nor a path grows with its depth.
    """
    numbers = itertools.count()
    pending = [top]
    while pending:
        directory = pending.pop()
        with contextlib.suppress(OSError):
            directory.chmod(0o700)
            with os.scandir(directory) as entries:
                found = list(entries)
            for entry in found:
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)  # noqa: PTH108 - there may be a million of them
                    elif directory == top:
                        pending.append(Path(entry.path))
                    else:
                        Path(entry.path).chmod(0o700)
                        pending.append(_move(entry.path, top, numbers))
            if directory != top:
                directory.rmdir()
    with contextlib.suppress(OSError):
        top.rmdir()


def _move(path: str, top: Path, numbers: itertools.count[int]) -> Path:
    while True:
        target = top / f".gone-{next(numbers)}"
        try:
            os.rename(path, target)  # noqa: PTH104
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                continue
            raise
        return target


def prefix() -> str:
    """What the names of all directories of this user's workers begin with."""
    return f"gristmill-{os.getuid()}-"


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of a worker's directory; -1 where it is not ours to hold."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(descriptor), os.lstat(path)
        if held.st_uid == os.getuid() and held.st_ino == named.st_ino and stat.S_ISDIR(named.st_mode):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return -1
