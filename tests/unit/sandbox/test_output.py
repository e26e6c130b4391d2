"""Output that stays bounded, and the FIFO that it comes from."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gristmill.sandbox.output import BURST, Fifo, Output


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 50), st.integers(0, 50))
def test_head_and_tail_of_any_stream(pieces: list[bytes], head: int, tail: int) -> None:
    output = Output(head, tail)
    for piece in pieces:
        output.add(piece)
        assert len(output._first) + len(output._last) <= head + 3 * tail + 40
    whole = b"".join(pieces)
    kept, dropped = output.collect()
    assert output.total == len(whole)
    if len(whole) <= head + tail:
        assert (kept, dropped) == (whole, 0)
    else:
        assert kept == whole[:head] + whole[len(whole) - tail :]
        assert dropped == len(whole) - head - tail


async def test_a_fifo_is_read_to_its_last_writers_end(tmp_path: Path) -> None:
    data = os.urandom(3 * BURST)
    output, ended = Output(len(data), 0), asyncio.Event()
    fifo = Fifo(f"{tmp_path}/f", output.add, ended.set)

    def write() -> None:
        with (tmp_path / "f").open("wb") as first, (tmp_path / "f").open("wb") as second:
            first.write(data[:BURST])
            first.close()
            second.write(data[BURST:])

    writer = threading.Thread(target=write)
    writer.start()
    async with asyncio.timeout(10):
        await ended.wait()
    writer.join()
    assert output.collect() == (data, 0)
    fifo.close()
    fifo.close()


async def test_catching_up_takes_what_is_there_at_once(tmp_path: Path) -> None:
    output = Output()
    fifo = Fifo(f"{tmp_path}/f", output.add)
    writer = os.open(f"{tmp_path}/f", os.O_WRONLY)
    os.write(writer, b"x" * 60_000)
    fifo.catch_up()  # without a turn of the event loop
    assert output.total == 60_000
    fifo.drop()
    os.write(writer, b"y" * 60_000)
    await asyncio.sleep(0.05)
    os.write(writer, b"z" * 60_000)  # does not block: somebody still reads
    assert output.total == 60_000
    os.close(writer)
    fifo.close()


async def test_a_lasting_fifo_outlives_its_writers(tmp_path: Path) -> None:
    output = Output()
    fifo = Fifo(f"{tmp_path}/f", output.add, lasting=True)
    for _ in range(3):
        with (tmp_path / "f").open("wb") as writer:
            writer.write(b"report\n")
        await asyncio.sleep(0.02)
    assert output.collect() == (b"report\n" * 3, 0)
    fifo.close()
