"""The one place where processes are started. Their end is told by a pidfd, so no thread or signal handler is needed.

Linux 5.3 or later. A process that asks to die with its parent dies with the *thread* that started it, so `spawn` must
be called on a thread that lives as long as the process, which is the main thread where the event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Child:
    """A process that this one started. `exited` gets its exit code; minus the signal's number where one killed it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        code = self._process.poll()
        if code is not None:
            self.close()
            if not self.exited.done() and not self._loop.is_closed():
                self.exited.set_result(code)

    async def wait(self, timeout: float) -> bool:
        """Wait for its end for up to `timeout` seconds; True if it has ended."""
        await asyncio.wait((self.exited,), timeout=timeout)
        return self.exited.done()

    def kill_children(self) -> None:
        """SIGKILL its direct children: a parent that waits for them ends after them, and says so."""
        if self._process.poll() is None:
            for pid in children(self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL it; idempotent."""
        self._process.kill()

    def wait_now(self, timeout: float) -> bool:
        """Like `wait`, without the event loop."""
        end = time.monotonic() + timeout
        while self._process.poll() is None:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        self._ended()
        return True

    def close(self) -> None:
        """Stop watching it; idempotent."""
        if self._pidfd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def spawn(argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", stdin: int, output: int) -> Child:
    """Start a process in a session of its own; stdout and stderr go to the same descriptor. Raises `OSError`."""
    # A session of its own, so that an interrupt at the terminal reaches us only and sandboxes end in order.
    process = subprocess.Popen(
        argv, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
    )
    try:
        return Child(process)
    except OSError:  # no descriptor is left to watch it with
        process.kill()
        process.wait()
        raise


def run(argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Run a short program to its end; its exit code (124 after `timeout` seconds) and what it printed."""
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def children(pid: int) -> list[int]:
    """The processes that a process with one thread started and that are still its own."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_marked(name: str, start: str) -> int:
    """SIGKILL every process whose environment was started with variable `name` beginning with `start`; how many.

    Again until none is found, because they may be forking. Each is held by a pidfd while its mark is read, so that a
    number that the kernel gave to another process meanwhile is never hit.
    """
    mark = f"{name}={start}".encode()
    killed: set[str] = set()  # one that is hit may be seen for a moment longer
    for _ in range(100):
        found = 0
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and _kill_if_marked(int(entry.name), mark):
                found += 1
                killed.add(entry.name)
        if not found:
            break
    return len(killed)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    try:
        if not _has(pid, mark):
            return False
        held = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has(pid, mark):
            return False
        signal.pidfd_send_signal(held, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(held)


def _has(pid: int, mark: bytes) -> bool:
    return any(entry.startswith(mark) for entry in environment(pid))


def environment(pid: int) -> list[bytes]:
    """The variables that a process was started with, as `NAME=value`; none where it has ended or is not ours."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - a thousand of them are read in a row
            return file.read().split(b"\0")
    except OSError:
        return []
