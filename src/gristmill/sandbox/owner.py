"""Which process made a thing that may outlive it, so that a later one can tell whether that process is no more.

A label is `PLACE.BOOT.PIDS.PID.START`: a digest of machine and user, one of the machine's boot, the process namespace,
the process and when it started. It has 63 characters at most, letters, digits and dots: any vendor takes it as a tag.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from pathlib import Path

_LABEL = re.compile(r"([0-9a-f]{12})\.([0-9a-f]{8})\.(\d*)\.(\d+)\.(\d*)")


def owner() -> str:
    """The label of this process."""
    return f"{_place()}.{_boot()}.{_namespace()}.{os.getpid()}.{_start('self')}"


def is_ours(label: str) -> bool:
    """Whether a process of this user on this machine made it."""
    found = _LABEL.fullmatch(label)
    return found is not None and found[1] == _place()


def is_dead(label: str) -> bool:
    """Whether the process was this user's on this machine, and is certainly no more."""
    found = _LABEL.fullmatch(label)
    if found is None or found[1] != _place():
        return False
    _, boot, namespace, pid, start = found.groups()
    if boot != _boot():
        return True  # the machine has been started anew since
    return namespace == _namespace() and start != _start(pid)


def _place() -> str:
    machine = platform.node()
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip() or machine
    # The machine's number is not meant to be told to others as it is.
    return hashlib.sha256(f"gristmill {machine} {os.getuid()}".encode()).hexdigest()[:12]


def _boot() -> str:
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    return ""


def _start(pid: str) -> str:
    """When a process started, in ticks since the machine did; empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
