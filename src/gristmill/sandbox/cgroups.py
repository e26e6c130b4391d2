"""Cgroups of sandboxes: they bound memory, processes and CPU, tell which limit was reached, and find every process.

```
<our own group; with version 2 the nearest above it that may have children>/
├── gristmill-<uid>/                 all sandboxes of a user: three quarters of what there is at most
│   └── gristmill-<uid>-<token>/     one worker, locked (flock) as long as it lives
│       └── s-<n>/                   one sandbox
└── gristmill-<uid>.beside/          version 2 in a container, as long as a worker lives: the processes of our own
                                     group, which must have none itself if its children are to be bounded
```
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gristmill.sandbox.cgroup_trees import Tree, allowance, pids, read, trees, write
from gristmill.sandbox.process import environment, run
from gristmill.sandbox.reaper import claim, dead
from gristmill.types import Limits

Doomed = Callable[[list[bytes]], bool]  # whether a process is, by the variables that it was started with
PAUSES = (0.01, 0.02, 0.05, 0)  # seconds between tries to make or remove groups
SHARE = 0.75  # of what there is, for all sandboxes together
END_SECONDS = 2.0  # for what was killed to be gone


class WorkerGroups:
    """One worker's groups. Making them removes those of dead workers.

    `controllers` are those that bound here; none where groups cannot be made. `allowance` is what this process may use.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._held: dict[Path, tuple[Tree, int]] = {}
        found = trees()
        self.allowance = allowance(found)
        _reap(found)
        for pause in PAUSES:
            self._claim(trees())
            if not found or self._works():
                break
            self.close()  # another worker, the last one for the moment, may just have undone what is for all
            time.sleep(pause)
        self.controllers = frozenset[str]().union(*(tree.controllers for tree, _ in self._held.values()))

    def make(self, limits: Limits) -> Group:
        """A group that does not exist yet."""
        name = f"s-{next(self._numbers)}"
        return Group({path / name: tree for path, (tree, _) in self._held.items()}, limits)

    def close(self) -> None:
        """Remove them, and end what is in them; idempotent."""
        while self._held:
            path, (tree, lock) = self._held.popitem()
            remove(path)
            os.close(lock)
            tree.leave()

    def _claim(self, found: list[Tree]) -> None:
        there = self.allowance
        total = Limits(memory_mb=int(there.memory_mb * SHARE), processes=int(there.processes * SHARE))
        for tree in found:
            with contextlib.suppress(OSError):
                path, lock = claim(tree.open(total))
                self._held[path] = tree, lock
                tree.enable(path)

    def _works(self) -> bool:
        """Whether a process can really be put into one."""
        if not self._held:
            return False
        group = self.make(Limits())
        try:
            group.create()
            move = 'for file; do echo 0 >"$file" || exit; done'
            return run(["/bin/sh", "-c", move, "sh", *group.entries], env={}, timeout=10)[0] == 0
        except OSError:
            return False
        finally:
            group.remove()


class Group:
    """One sandbox's. `limits` are those that it shall hold; 0 is no limit."""

    def __init__(self, places: dict[Path, Tree], limits: Limits) -> None:
        self.limits = limits
        self._places = places
        self._paths = {name: path for path, tree in places.items() for name in tree.controllers}
        self._unified = any(tree.unified for tree in places.values())
        self._changing = threading.Lock()
        self._gone = False
        self._killed = self._refused = self._throttled = 0
        self._kills = "memory.events" if self._unified else "memory.oom_control"
        self._open: dict[str, int] = {}  # descriptors of the files that are read around every command

    @property
    def entries(self) -> list[str]:
        """The files that take the number of a process which is to enter."""
        return [f"{path}/cgroup.procs" for path in self._places]

    def create(self) -> None:
        """Make it. Raises `OSError`. Like all that changes groups it may have to wait for the kernel."""
        for path, tree in self._places.items():
            path.mkdir()
            tree.bound(path, self.limits)

    def take(self, pid: int) -> None:
        """Make it and put a process in, with all that it starts from now on. Raises `OSError`."""
        with self._changing:
            if not self._gone:
                self.create()
                for entry in self.entries:
                    write(entry, str(pid))
                for controller, name in (("pids", "pids.current"), ("pids", "pids.events"), ("memory", self._kills)):
                    if controller in self._paths:
                        self._open[name] = os.open(self._paths[controller] / name, os.O_RDONLY | os.O_CLOEXEC)

    def remove(self) -> None:
        """Remove it, and end what is in it; idempotent."""
        with self._changing:
            self._gone = True
            while self._open:
                os.close(self._open.popitem()[1])
            for path in self._places:
                remove(path)

    def crowded(self) -> bool:
        """Whether so many processes run that soon none could be started."""
        most, now = self.limits.processes, self._text("pids", "pids.current")
        return bool(most and now) and int(now) > most - min(most // 4, 128)

    def end(self, first: int, doomed: Doomed | None = None) -> None:
        """Kill processes, see `end`; wait also for whoever has to take note of their end, for until then they count."""
        end(next(iter(self._places)), first, doomed)
        _wait(lambda: not self.crowded())

    def news(self, *, timed_out: bool = False) -> str:
        """Which limits were reached since this was last asked, in sentences; empty if none was."""
        said = []
        killed = self._count("memory", self._kills, "oom_kill")
        if killed > self._killed:
            count = killed - self._killed
            what = f"{count} processes were" if count > 1 else "a process was"
            said.append(f"{self._memory_limit()} was reached, and {what} killed.")
        refused = self._count("pids", "pids.events", "max")
        if refused > self._refused:
            said.append(f"The limit of {self.limits.processes} processes was reached, and no more could be started.")
        self._killed, self._refused = killed, refused
        if timed_out and self.limits.cpus:
            throttled = self._count("cpu", "cpu.stat", "nr_throttled")
            if throttled > self._throttled:
                said.append(f"The limit of {self.limits.cpus:g} CPUs slowed it down.")
            self._throttled = throttled
        return " ".join(said)

    def _memory_limit(self) -> str:
        own = f"The memory limit of {self.limits.memory_mb} MiB"
        peak = self._text("memory", "memory.peak" if self._unified else "memory.max_usage_in_bytes")
        if peak and int(peak) >> 20 < (self.limits.memory_mb + self.limits.disk_mb) * 0.95:
            return "The memory that all sandboxes together may use on this machine"
        return own

    def _count(self, controller: str, name: str, key: str) -> int:
        _, _, after = ("\n" + self._text(controller, name)).partition(f"\n{key} ")
        return int(after.partition("\n")[0] or 0)

    def _text(self, controller: str, name: str) -> str:
        path = self._paths.get(controller)
        try:
            if name in self._open:
                return os.pread(self._open[name], 4096, 0).decode()
            return read(f"{path}/{name}") if path else ""
        except OSError:
            return ""


def reap() -> int:
    """Remove the groups of workers of this user that are no more; how many."""
    return _reap(trees())


def _reap(found: list[Tree]) -> int:
    reaped = 0
    for tree in itertools.chain.from_iterable(tree.near() for tree in found):
        for path, lock in dead((tree.all,)):
            remove(path)
            os.close(lock)
            reaped += 1
        tree.leave()
    return reaped


def remove(path: Path) -> None:
    """Remove a group with those in it, and end their processes. Best effort, never raises."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove(Path(entry.path))
    for pause in PAUSES:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            end(path)
            time.sleep(pause)


def end(path: Path, first: int = 0, doomed: Doomed | None = None) -> None:
    """Kill the processes of a group but the first, all or the doomed, and wait for their end.

    All are stopped before: at the limit those that are stopped leave no room for new ones, however fast they fork. And
    they must have come to rest: a thousand that fork hold each other up for many seconds when they have to exit, and
    the lock on their variables too.
    """
    stopped: set[int] = set()
    for _ in range(100):
        found = pids(path) - stopped - {first}
        if not found:
            break
        _signal(path, found, signal.SIGSTOP)
        stopped |= found
    _wait(lambda: all(_state(pid) in "TtZX" for pid in stopped))
    left = {pid for pid in stopped if doomed and not doomed(environment(pid))}
    _signal(path, stopped - left, signal.SIGKILL)
    _signal(path, left, signal.SIGCONT)
    _wait(lambda: (stopped - left).isdisjoint(pids(path)))


def _wait(done: Callable[[], bool]) -> None:
    """Until something is so, or for as long as it may take."""
    latest = time.monotonic() + END_SECONDS
    while not done() and time.monotonic() < latest:
        time.sleep(0.005)


def _state(pid: int) -> str:
    """The letter for what a process does (proc(5)); X where it is no more."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _signal(path: Path, found: set[int], number: signal.Signals) -> None:
    """Signal processes of a group.

    Each is held by a pidfd while it is seen to be there, so that a number which the kernel gave to another process
    meanwhile is never hit.
    """
    mine = f"/{path.parent.name}/{path.name}\n"
    for pid in found:
        with contextlib.suppress(OSError):
            held = os.pidfd_open(pid)
            try:
                if mine in read(f"/proc/{pid}/cgroup"):
                    signal.pidfd_send_signal(held, number)
            finally:
                os.close(held)
