"""Where on this machine groups of our own can be made, by the files of the kernel and what they let us do.

Version 2 has one tree, version 1 one for each controller. Described in the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.sandbox.reaper import prefix
from gristmill.types import Limits

CONTROLLERS = frozenset({"memory", "pids", "cpu"})
NEEDED = frozenset({"memory", "pids"})  # of a tree of version 2
PERIOD = 100_000  # microseconds over which CPU time is counted


@dataclass(frozen=True)
class Tree:
    """One of them. `own` is the group that this process is in, `top` the parent of ours; `unified` says version 2."""

    mount: Path
    own: Path
    top: Path
    controllers: frozenset[str]
    unified: bool

    @property
    def all(self) -> Path:
        """The group of all sandboxes of this user."""
        return self.top / prefix().rstrip("-")

    def near(self) -> list[Tree]:
        """This one, and those at its side that earlier workers made: every login or job may have a group of its own."""
        tops = {self.top}
        if self.top != self.mount:
            tops |= {path.parent for path in self.top.parent.glob(f"*/{self.all.name}")}
        return [dataclasses.replace(self, top=top) for top in tops]

    def open(self, total: Limits) -> Path:
        """Make the group of all, which `total` bounds. Raises `OSError`."""
        if self.unified and not _enabled(self.top) >= self.controllers:
            self._enable_own()
        self.all.mkdir(exist_ok=True)
        self.enable(self.all)
        with contextlib.suppress(OSError):  # another worker has, with what it found
            self.bound(self.all, total)
        return self.all

    def enable(self, path: Path) -> None:
        """Let the children of a group be bounded. Raises `OSError`."""
        if self.unified:  # all at once: cpu alone would be given to a group with processes, and be in the way then
            write(f"{path}/cgroup.subtree_control", " ".join(f"+{name}" for name in self.controllers))

    def bound(self, path: Path, limits: Limits) -> None:
        """Set the limits of a group, as far as this tree has them. Raises `OSError`."""
        memory = (limits.memory_mb + limits.disk_mb) << 20  # a workspace that is bounded lies in memory
        if limits.memory_mb and "memory" in self.controllers:
            write(f"{path}/{'memory.max' if self.unified else 'memory.limit_in_bytes'}", str(memory))
            swap = ("memory.swap.max", "0") if self.unified else ("memory.memsw.limit_in_bytes", str(memory))
            with contextlib.suppress(FileNotFoundError):  # where swap is not counted
                write(f"{path}/{swap[0]}", swap[1])
        if limits.processes and "pids" in self.controllers:
            write(f"{path}/pids.max", str(limits.processes))
        if limits.cpus and "cpu" in self.controllers:
            quota = max(PERIOD // 100, int(limits.cpus * PERIOD))
            write(f"{path}/{'cpu.max' if self.unified else 'cpu.cfs_quota_us'}", str(quota))

    def leave(self) -> None:
        """Undo what was done for all workers, if none is left."""
        with contextlib.suppress(OSError):
            self.all.rmdir()
            if self.unified and self._beside.is_dir():
                write(f"{self.top}/cgroup.subtree_control", " ".join(f"-{name}" for name in self.controllers))
                _move(self._beside, self.top)
                self._beside.rmdir()

    @property
    def _beside(self) -> Path:
        return self.top / f"{prefix().rstrip('-')}.beside"

    def _enable_own(self) -> None:
        """The same as `enable` for our own group, whose processes must stand beside its children first."""
        for last in (*[False] * 20, True):
            try:
                self.enable(self.top)
                return
            except OSError:
                if last:
                    raise
            self._beside.mkdir(exist_ok=True)
            _move(self.top, self._beside)


def trees() -> list[Tree]:
    """Where groups can be made, as far as files tell; no controller is in two of them."""
    found: list[Tree] = []
    with contextlib.suppress(OSError):  # a kernel without cgroups
        own = dict(line.split(":", 2)[1:] for line in read("/proc/self/cgroup").splitlines())
        for tree in _candidates(own):
            if not any(tree.controllers & other.controllers for other in found):
                found.append(tree)
    return found


def allowance(found: list[Tree]) -> Limits:
    """The memory and processes that this process may use: of the machine, and of the groups that it is in."""
    memory: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processes: float = min(_number(Path("/proc/sys/kernel", name)) for name in ("pid_max", "threads-max"))
    for tree in found:
        for path in (tree.own, *tree.own.parents):
            if path.is_relative_to(tree.mount):
                memory = min(memory, _number(path / ("memory.max" if tree.unified else "memory.limit_in_bytes")))
                processes = min(processes, _number(path / "pids.max"))
    return Limits(memory_mb=int(memory) >> 20, processes=int(processes) if math.isfinite(processes) else 0)


def pids(path: Path) -> set[int]:
    """The processes in a group; empty where it is no more."""
    try:
        return {int(line) for line in read(f"{path}/cgroup.procs").split()}
    except OSError:
        return set()


def read(path: str) -> str:
    """A file of the kernel. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts).decode(errors="replace")
    finally:
        os.close(descriptor)


def write(path: str, text: str) -> None:
    """Write to a file of the kernel. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _candidates(own: dict[str, str]) -> Iterator[Tree]:
    """`own` has the path of our group by the names of its hierarchy's controllers, "" for version 2."""
    for line in read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            names: str | None = ""
        elif kind == "cgroup":
            names = next((n for n in own if n and set(n.split(",")) <= set(options.split(","))), None)
        else:
            continue
        # A mount may show a part of its hierarchy only, and what is outside of our namespace has ".." in its path.
        if names is None or names not in own or not Path(own[names]).is_relative_to(root) or ".." in root + own[names]:
            continue
        mount = Path(place)
        group = mount / Path(own[names]).relative_to(root)
        tree = _single(mount, group, names) if names else _unified(mount, group)
        if tree and tree.controllers:
            yield tree


def _single(mount: Path, own: Path, names: str) -> Tree | None:
    usable = os.access(own, os.W_OK)
    return Tree(mount, own, own, CONTROLLERS & set(names.split(",")), unified=False) if usable else None


def _unified(mount: Path, own: Path) -> Tree | None:
    if not own.is_dir():
        return None
    for path in own.parents:
        if path.is_relative_to(mount) and _enabled(path) >= NEEDED and _is_ours(path):
            return Tree(mount, own, path, CONTROLLERS & _enabled(path), unified=True)
    available = CONTROLLERS & set(read(f"{own}/cgroup.controllers").split())
    return Tree(mount, own, own, available, unified=True) if available >= NEEDED and _is_ours(own) else None


def _is_ours(path: Path) -> bool:
    """Whether we may make groups there, and move processes between groups below it."""
    return os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)


def _enabled(path: Path) -> set[str]:
    return set(read(f"{path}/cgroup.subtree_control").split())


def _number(path: Path) -> float:
    """What a file says; infinite where it says "max", or is not there."""
    try:
        return int(read(str(path)))
    except (OSError, ValueError):
        return math.inf


def _move(source: Path, target: Path) -> None:
    """Put all processes of a group into another. Raises `OSError`."""
    while found := pids(source):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                write(f"{target}/cgroup.procs", str(pid))
