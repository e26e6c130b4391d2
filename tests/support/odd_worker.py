"""A worker process whose sessions do what the text of their prompt says; speaks the real frames over a real socket.

`ok SECONDS` ends well after that time; `die` ends the process, `block` stops it from answering; `linger` closes the
socket and lives on for a while; `garbage` says what is no frame; `reserve` asks twice for room and dies; `credit` meets
an empty account and waits; `credit die` does, and dies; `lost` gives nothing back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

import msgspec

from gristmill.run import frames
from gristmill.session.spec import SessionSpec
from gristmill.session.summary import RowShape, lost_session


async def main() -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))

    def send(frame: frames.Frame) -> None:
        writer.write(frames.encode(frame))

    async def play(lease: int, spec: SessionSpec) -> None:
        word, _, rest = spec.task.text.partition(" ")
        if word == "ok":
            await asyncio.sleep(float(rest or 0))
            ended = lost_session(spec, "", RowShape(model="m", known_tools=()))
            send(frames.Done(lease, msgspec.structs.replace(ended, state="kept", reason=str(os.getpid()))))
        elif word == "block":
            time.sleep(60)
        elif word == "linger":
            writer.close()
            await writer.wait_closed()
            time.sleep(1.5)
            os._exit(1)
        elif word == "garbage":
            writer.write(b"\0\0\0\1\xc1")
        elif word == "reserve":
            send(frames.Reserve(1))
            send(frames.Reserve(2))
        elif word == "credit":
            send(frames.OutOfCredit(1, "empty"))
        elif word == "lost":
            send(frames.Lost(lease))
        if word in ("die", "reserve") or rest == "die":
            await writer.drain()
            await asyncio.sleep(0.1)
            os._exit(1)

    send(frames.Ready(os.getpid()))
    leases: dict[int, asyncio.Task[None]] = {}
    while (frame := await frames.read_for_worker(reader)) is not None:
        if isinstance(frame, frames.Lease):
            leases[frame.id] = asyncio.create_task(play(frame.id, frame.spec))
        elif isinstance(frame, frames.Stop):
            for lease in leases:
                send(frames.Lost(lease))
        elif isinstance(frame, frames.Finish):
            break


if __name__ == "__main__":
    asyncio.run(main())
