"""Labels that tell whose a thing is, and when its maker is certainly no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gristmill.sandbox.owner import is_dead, is_ours, owner

PARTS = ("place", "boot", "namespace", "pid", "start")


def with_part(name: str, value: str) -> str:
    parts = dict(zip(PARTS, owner().split("."), strict=True)) | {name: value}
    return ".".join(parts.values())


def test_a_label_fits_everywhere() -> None:
    assert re.fullmatch(r"[a-z0-9.]{20,63}", owner()) and owner() == owner()


def test_who_lives_and_who_does_not() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from gristmill.sandbox.owner import owner; print(owner())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert is_ours(child) and is_dead(child)
    assert is_ours(owner()) and not is_dead(owner())
    assert is_dead(with_part("start", "1"))  # its number belongs to another process now
    assert is_dead(with_part("boot", "01234567")) and is_ours(with_part("boot", "01234567"))


def test_what_cannot_be_judged_is_left_alone() -> None:
    for label in (
        "",
        "nonsense",
        owner() + ".1",
        f"x{owner()}",
        with_part("pid", "-1"),
        with_part("place", "0123456789ab"),
        with_part("namespace", "1"),
    ):
        assert not is_dead(label), label
    assert not is_ours(with_part("place", "0123456789ab")) and not is_ours("")
    assert os.getpid() == int(owner().split(".")[3])
