"""One process owns a run directory: a lock that the kernel gives back when the process dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from gristmill.errors import RunLocked
from gristmill.run.atomic import disk_error, is_alive

_ORPHAN_SECONDS = 5.0  # children of a killed owner hold its lock until they notice; they end themselves


class Lock:
    """The lock of a run directory, held from the making of this object until `release`."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises `RunLocked`, which names the owner, or `StoreError` where the file cannot be made."""
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(path, error) from error
        try:
            self._take(path)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise disk_error(path, error) from error
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path) -> None:
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            pid, host = self._owner()
            local = host == socket.gethostname()
            orphaned = not pid or (local and not is_alive(pid))
            if not orphaned or time.monotonic() > deadline:
                where = "" if local else f" on {host}"
                who = f"process {pid}{where}" if pid else "a process that is just starting"
                raise RunLocked(
                    f"The run directory {path.parent} is in use by {who}.",
                    "Wait until it ends or stop it, or choose another --run_name.",
                )
            time.sleep(0.02)

    def _owner(self) -> tuple[int, str]:
        pid, _, host = os.pread(self._descriptor, 300, 0).decode("utf-8", "replace").strip().partition(" ")
        return (int(pid), host) if pid.isdecimal() else (0, "")

    def release(self) -> None:
        """Give the lock back; idempotent. The file stays: removing it would let two processes own two files."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
