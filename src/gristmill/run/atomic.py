"""Files that are replaced as a whole: a reader sees the old one or the new one, never half, also after a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import StoreError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file's content. Raises `StoreError` where the disk does not take it; the old content stays then."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream that takes the place of a file when the block ends without an error.

    Raises:
        StoreError: the disk does not take it; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # it is gone where all went well
            temporary.unlink()


def sweep_temporaries(directory: Path) -> None:
    """Remove what processes left that were killed while they replaced a file."""
    for path in directory.glob(".*.tmp"):
        writer = path.name.split(".")[-2]
        if writer.isdecimal() and not is_alive(int(writer)):
            path.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """True where a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def sync_directory(path: Path) -> None:
    """Make new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> StoreError:
    """A `StoreError` that names the disk and how full it is."""
    place = path.absolute()
    while place != place.parent and not os.path.ismount(place):
        place = place.parent
    try:
        free = f"{shutil.disk_usage(place).free // 2**20} MiB free"
    except OSError:
        free = "its free space unknown"
    return StoreError(
        f"Cannot write {path}: {error.strerror or error} (disk mounted at {place}, {free}).",
        "What was written before is intact; make room or mend the disk, then continue with --resume.",
    )
