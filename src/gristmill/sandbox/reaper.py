"""Where sandboxes keep their files on this machine, and how a later run finds what a killed one left.

```
<temporary directory>/
└── gristmill-<uid>-<token>/   one worker, mode 0700, locked (flock) as long as the worker lives
    └── s-<n>/                 one sandbox
```
The token is also the beginning of the mark that a sandbox without namespaces puts on its processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import tempfile
from pathlib import Path

from gristmill.sandbox.process import kill_marked

MARK = "SBX_CALL"  # environment variable of every command: which call it belongs to


class WorkerPlace:
    """One worker's directory. Making it removes what dead workers of the same user left.

    Args:
        root: where to make it; the system's temporary directory if None.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(tempfile.gettempdir())
        reap(self.root)
        prefix = _prefix()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root))
            self._lock = _lock(self.path)
            if self._lock >= 0:
                break  # else another worker took it for a dead one's in this very moment, and removes it
        self.token = self.path.name.removeprefix(prefix)
        self._numbers = itertools.count(1)

    def session(self) -> Path:
        """A new directory for one sandbox."""
        path = self.path / f"s-{next(self._numbers)}"
        path.mkdir(mode=0o700)
        return path

    def close(self) -> None:
        """Remove it with all that is in it; idempotent."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def reap(root: Path | None = None) -> int:
    """Remove what workers of this user that are no more left behind, and end marked processes of theirs; how many.

    Never touches a directory whose owner lives, or anyone else's.
    """
    reaped = 0
    prefix = _prefix()
    for path in (root or Path(tempfile.gettempdir())).glob(prefix + "*"):
        lock = _lock(path)
        if lock < 0:
            continue
        try:
            kill_marked(MARK, path.name.removeprefix(prefix) + ".")
            remove_tree(path)
            reaped += 1
        finally:
            os.close(lock)
    return reaped


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


def _prefix() -> str:
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
