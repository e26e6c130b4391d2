"""Byte streams over pipes of a child, and over single commands."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import SandboxError
from gristmill.sandbox.child_stream import ChildStream
from gristmill.sandbox.polled_stream import PolledStream
from gristmill.sandbox.stream import Receiver
from gristmill.testing.boxes import running, soon, unique_sleep

ENV = {"PATH": "/usr/bin:/bin"}


class Heard(Receiver):
    """What comes from a stream, as it is."""

    def __init__(self) -> None:
        super().__init__("")
        self.data = b""
        self.reason: str | None = None

    def take(self, data: bytes) -> None:
        self.data += data

    def ended(self, reason: str) -> None:
        super().ended(reason)
        assert self.reason is None
        self.reason = reason


async def heard_of(*argv: str, data: bytes = b"") -> tuple[Heard, ChildStream]:
    heard = Heard()
    stream = ChildStream(list(argv), ENV, heard)
    stream.write(data)
    stream.write_eof()
    assert await soon(lambda: heard.reason is not None)
    return heard, stream


async def test_bytes_go_in_and_come_out() -> None:
    data = bytes(range(256)) * 8000
    heard, stream = await heard_of("cat", data=data)
    assert heard.data == data and stream.code == 0
    heard, stream = await heard_of("sh", "-c", "echo out; echo err >&2; exit 3", data=data)
    assert heard.data == b"out\nerr\n" and stream.code == 3


async def test_its_end_is_its_own_end() -> None:
    sleep = unique_sleep()
    began = time.monotonic()
    heard, _ = await heard_of("sh", "-c", f"{sleep} & echo said")
    assert heard.data == b"said\n" and time.monotonic() - began < 3
    assert await soon(lambda: len(running(sleep)) == 1)
    (pid,) = running(sleep)
    await heard_of("kill", str(pid))


async def test_a_writer_is_held_up_until_somebody_reads() -> None:
    heard = Heard()
    stream = ChildStream(["sh", "-c", "sleep 0.3; cat >/dev/null; echo done"], ENV, heard)
    stream.write(bytes(1_000_000))
    began = time.monotonic()
    await stream.drain()
    assert time.monotonic() - began > 0.2
    stream.write_eof()
    assert await soon(lambda: heard.data == b"done\n" and heard.reason == "")


async def test_nothing_is_read_while_it_is_paused() -> None:
    heard = Heard()
    stream = ChildStream(["sh", "-c", "echo one; read x; echo two"], ENV, heard)
    assert await soon(lambda: heard.data == b"one\n")
    stream.pause()
    stream.write(b"x\n")
    await asyncio.sleep(0.05)
    stream.resume()
    assert await soon(lambda: heard.data == b"one\ntwo\n" and heard.reason == "")


async def test_closing_ends_what_reads() -> None:
    heard = Heard()
    stream = ChildStream(["cat"], ENV, heard)
    stream.close()
    stream.close()
    stream.write(b"x")
    assert await soon(lambda: heard.reason == "" and stream.code == 0)


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(SandboxError, match="no-such-program"):
        ChildStream(["no-such-program"], ENV, Heard())


# Over single commands: what they print is cut anywhere.

PIECES = st.lists(st.sampled_from([b"text", b"\0", b"\0\1", b"LIFE", b"\0\1x", b"\n", b"tt\n"]), max_size=12)


@given(PIECES, st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_marks_are_taken_out_of_what_is_cut_anywhere(pieces: list[bytes], cuts: list[int], ends: bool) -> None:
    async def never(*_: object) -> str:
        raise AssertionError

    async def scenario() -> None:
        heard = Heard()
        stream = PolledStream(never, never, heard)  # type: ignore[arg-type]
        life, end = stream._life, stream._end
        sent = b"".join(life if piece == b"LIFE" else piece for piece in pieces) + (end if ends else b"")
        wanted = b"".join(piece for piece in pieces if piece != b"LIFE")
        places = sorted({min(cut, len(sent)) for cut in cuts} | {0, len(sent)})
        over = [stream._take(sent[a:b]) for a, b in itertools.pairwise(places)]
        if ends:
            assert heard.data == wanted and over[-1] and not any(over[:-1])
        else:
            assert heard.data + stream._rest == wanted and not any(over)
            assert len(stream._rest) < len(life)

    asyncio.run(scenario())
