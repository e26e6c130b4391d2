"""The watch on the disk: who is ended when it fills, and who is not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.errors import SandboxError
from gristmill.sandbox.disk import INODE, DiskWatch, size
from gristmill.sandbox.host import HostSandboxes
from gristmill.testing.boxes import soon, spec, text


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[HostSandboxes]:
    provider = HostSandboxes(tmp_path)
    # As if all that is free now, and more, had to stay free.
    reserve = 2 * shutil.disk_usage(tmp_path).free
    provider._watch = DiskWatch(tmp_path, lambda: provider._made, reserve=reserve, blame=8 << 20)
    yield provider
    provider.close()


async def test_on_a_full_disk_the_largest_is_ended_with_the_reason(provider: HostSandboxes) -> None:
    small, large = provider.make(spec()), provider.make(spec())
    for box in (small, large):
        await box.start()
    fill = asyncio.create_task(large.exec("head -c 20M /dev/zero > x; sleep 60", timeout=60))
    provider._watch._looking = None  # do not wait until it looks again
    await asyncio.sleep(0.3)
    provider._watch.begin()
    with pytest.raises(SandboxError, match=r"The disk is nearly full.* held most, 2\d MiB\. --sandbox_disk bounds"):
        await asyncio.wait_for(fill, 15)
    with pytest.raises(SandboxError, match="The disk is nearly full"):
        await large.read("x", 1)
    place = Path(large.workspace)
    assert await soon(lambda: not place.exists())
    assert await text(small, "echo well") == "well"
    await large.stop()
    await small.stop()


async def test_it_looks_only_while_something_runs(provider: HostSandboxes) -> None:
    box = provider.make(spec())
    assert provider._watch._looking is None
    await box.start()
    looking = provider._watch._looking
    assert looking is not None
    await box.stop()
    looking.cancel()  # its pause
    await asyncio.wait([looking])
    provider._watch.begin()
    assert provider._watch._looking is not None
    await asyncio.wait_for(provider._watch._looking, 5)


def test_size_counts_what_the_disk_holds(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_bytes(os.urandom(1 << 20))
    (tmp_path / "up").symlink_to(tmp_path)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert (1 << 20) + 4 * INODE <= size(tmp_path) < (2 << 20)
    assert size(tmp_path / "missing") == 0
