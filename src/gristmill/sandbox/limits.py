"""Which limits `local` and `host` hold on this machine: by cgroups where they can be made, else what rlimits can do.

Rlimits bound a process, not a sandbox, so for memory they are no more than a guard. Only the number of processes is
counted as a whole: per user namespace, for everybody but root, since Linux 5.14.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from gristmill.config import SandboxConfig
from gristmill.errors import SandboxError, SetupError
from gristmill.sandbox.base import SandboxProvider, SandboxSpec
from gristmill.sandbox.cgroups import Group, WorkerGroups
from gristmill.types import Limits

# Where the user asked for nothing: no more than half of what there is, and no more than this.
MEMORY_MB = 4096
PROCESSES = 1024
COUNTED_BY_NAMESPACE = (5, 14)  # the first Linux whose user namespaces count their processes
FLAGS = {
    "memory_mb": "--sandbox_memory",
    "disk_mb": "--sandbox_disk",
    "cpus": "--sandbox_cpus",
    "processes": "--sandbox_processes",
}


class WorkerLimits:
    """What the sandboxes of one worker are held to.

    Args:
        isolated: whether they have namespaces of their own, and a workspace that may lie in memory.
    """

    def __init__(self, *, isolated: bool) -> None:
        self._groups = WorkerGroups()
        # How the first process of a sandbox is found.
        has_children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
        controllers = self._groups.controllers if has_children else frozenset[str]()
        names = {"memory": "memory_mb", "pids": "processes", "cpu": "cpus"}
        self.held = frozenset(names[controller] for controller in controllers)
        self._counted = isolated and "processes" not in self.held and _counted_by_namespace()
        if self._counted:
            self.held |= {"processes"}
        if isolated:
            self.held |= {"disk_mb"}
        self._grouped = bool(controllers)

    def of(self, asked: Limits) -> Limits:
        """The limits of a sandbox for which these were asked. Raises `SandboxError` for what cannot be."""
        there = self._groups.allowance
        if asked.disk_mb > there.memory_mb // 2:
            raise SandboxError(
                f"A workspace of {asked.disk_mb} MiB, which lies in memory, is more than half of this machine's.",
                f"Give at most {there.memory_mb // 2} with --sandbox_disk or TERMINAL_CONTAINER_DISK.",
            )
        return msgspec.structs.replace(
            asked,
            memory_mb=asked.memory_mb or min(MEMORY_MB, there.memory_mb // 2),
            processes=asked.processes or min(PROCESSES, there.processes // 2),
        )

    def group(self, limits: Limits) -> Group | None:
        """A cgroup that does not exist yet; None where there can be none."""
        return self._groups.make(limits) if self._grouped else None

    def bounds(self, limits: Limits) -> tuple[str, int]:
        """Shell text that does for the command which runs it what a cgroup would, as far as that goes.

        Also the number of processes that it allows, 0 where it does not bound them.
        """
        bounds = []
        if "memory_mb" not in self.held:
            bounds.append(f"ulimit -d {limits.memory_mb << 10}")
        if self._counted:
            bounds.append(f"ulimit -u {limits.processes}")
        return "; ".join(bounds) or ":", limits.processes if self._counted else 0

    def close(self) -> None:
        """Remove what was made; idempotent."""
        self._groups.close()


def limits_held() -> tuple[list[str], list[str]]:
    """The flags of limits that `local` holds a session to on this machine, and those that it does not."""
    limits = WorkerLimits(isolated=True)
    limits.close()
    names = [(FLAGS[name], name in limits.held) for name in FLAGS]
    return [flag for flag, held in names if held], [flag for flag, held in names if not held]


def check_limits(kind: type[SandboxProvider], config: SandboxConfig) -> None:
    """Raise `SetupError` for limits that sandboxes of this kind cannot hold to on this machine. Starts nothing."""
    asked = {name for name in FLAGS if getattr(config.limits, name)}
    if not asked:
        return
    provider = kind(options=config.options)
    try:
        _check(provider, config, asked)
    finally:
        provider.close()


def _check(provider: SandboxProvider, config: SandboxConfig, asked: set[str]) -> None:
    if missing := sorted(FLAGS[name] for name in asked - provider.capabilities.limits):
        raise SetupError(
            f"--sandbox={config.kind} cannot hold to {' and '.join(missing)} on this machine.",
            "Leave it out (TERMINAL_CONTAINER_* in the environment counts too), or use --sandbox=docker. local and host"
            " can where they may make cgroups: `systemd-run --user --scope -p Delegate=yes gristmill run …`.",
        )
    try:
        provider.make(SandboxSpec(session_id="check", run_id="check", limits=config.limits))
    except SandboxError as error:
        raise SetupError(error.message, error.mend) from error


def _counted_by_namespace() -> bool:
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    return os.geteuid() != 0 and version >= COUNTED_BY_NAMESPACE
