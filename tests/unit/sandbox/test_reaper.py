"""Removing what a sandbox left behind, whatever that is."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from gristmill.sandbox.process import kill_marked
from gristmill.sandbox.reaper import MEMORY, WorkerPlace, _has_room, reap, remove_tree


def test_a_tree_deeper_than_any_path_and_call_stack(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("directory", dir_fd=descriptor)
        deeper = os.open("directory", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    os.close(descriptor)
    remove_tree(top)
    assert not top.exists()


def test_odd_names_modes_and_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").write_text("kept")
    top = tmp_path / "top"
    inner = top / "a" / "b\n'\"" / os.fsdecode(b"\xff\xfe") / ("n" * 255)
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "out").symlink_to(outside)
    (top / "out").symlink_to(outside)
    (top / "loop").symlink_to(top)
    (top / ".gone-0").write_text("in the way")
    (top / ".gone-1").mkdir()
    (top / ".gone-1" / "full").mkdir()
    os.mkfifo(top / "a" / "fifo")
    for path in (inner, inner.parent, top / "a", top):
        path.chmod(0o000)
    remove_tree(top)
    assert not top.exists()
    assert (outside / "kept").read_text() == "kept" and outside.stat().st_mode & 0o777 == 0o755
    remove_tree(top)  # missing is fine


def test_a_workers_place_is_private_and_goes_away(tmp_path: Path) -> None:
    place, other = WorkerPlace(tmp_path), WorkerPlace(tmp_path)
    assert place.path != other.path and place.path.is_dir()
    assert place.path.stat().st_mode & 0o777 == 0o700
    (first, _), (second, memory) = place.session(), place.session()
    assert first != second and first.is_dir() and second.is_dir() and memory == second
    place.close()
    place.close()
    assert not place.path.exists() and other.path.is_dir()
    other.close()


@pytest.mark.skipif(not _has_room(MEMORY), reason="no room in memory on this machine")
def test_small_files_lie_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = WorkerPlace()
    directory, memory = place.session()
    assert directory.is_relative_to(tmp_path) and memory.is_relative_to(MEMORY) and memory.is_dir()
    assert place.path.parent == tmp_path and memory.parent.stat().st_mode & 0o777 == 0o700
    os.close(place._held.pop(memory.parent))  # as if its owner had died
    reap()
    assert not memory.parent.exists() and directory.exists()
    place.close()
    assert list(tmp_path.iterdir()) == []


def test_only_marked_processes_are_killed() -> None:
    def start(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={"SBX_TEST_MARK": mark})

    token = f"t{os.getpid()}"
    mine, other, longer = start(f"{token}.1"), start("else.1"), start(f"x{token}.1")
    try:
        assert kill_marked("SBX_TEST_MARK", f"{token}.") == 1
        assert mine.wait(5) == -9
        assert other.poll() is None and longer.poll() is None
        assert kill_marked("SBX_TEST_MARK", f"{token}.") == 0
    finally:
        for process in (mine, other, longer):
            process.kill()
            process.wait()
