"""A TCP connection to a server inside a sandbox, carried by one background command of bash.

A sandbox has a network of its own, so its ports are reached from inside. Both ways go in lines. The relay reads `d` and
base64 data for the server, or `a`, which asks for one more piece of what the server says. It prints `+` once connected,
and then a line of base64 data per piece asked for; an empty one is the end. Asking piece by piece keeps what a job's
output buffer must hold below its size (`sandbox.base.OUTPUT_TAIL`), so that nothing is dropped.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket

from gristmill.errors import SandboxError
from gristmill.sandbox.base import OUTPUT_TAIL, Job, Sandbox

CONNECT_SECONDS = 20.0
PIECE = 65_536  # bytes of one line's data
WINDOW = 3  # pieces asked for and not yet here; as base64 they stay below OUTPUT_TAIL
SLOWEST = 0.025  # seconds between looks at an idle connection

# `dd` with count=1 is one read: it gives what is there without waiting for more.
_SCRIPT = """\
exec 2>/dev/null
{ exec 3<>/dev/tcp/127.0.0.1/%(port)d; } || { exec 3<>/dev/tcp/::1/%(port)d; } || exit 7
echo +
exec 4> >(while read -r _; do dd bs=%(piece)d count=1 <&3 | base64 -w0; echo; done)
while read -r kind data; do
  case $kind in
    d) base64 -d <<<"$data" >&3 || exit;;
    a) echo >&4;;
  esac
done
"""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(sandbox: Sandbox, port: int, tasks: set[asyncio.Task[None]]) -> Streams:
    """A connection to `localhost:port` inside the sandbox. Raises OSError where nothing listens there.

    What carries it runs as a task in `tasks`, until either side closes it; cancelling ends it too.
    """
    try:
        job = await sandbox.spawn(_SCRIPT % {"port": port, "piece": PIECE})
    except SandboxError as error:
        raise OSError(str(error)) from error
    try:
        await _await_connection(job, port)
        ours, theirs = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
        far = await asyncio.open_connection(sock=theirs)
    except BaseException:
        await _kill(job)
        raise
    task = asyncio.create_task(_carry(job, *far))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return streams


async def _await_connection(job: Job, port: int) -> None:
    pause = 0.001
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while not job.output()[0].startswith(b"+\n"):
                if await job.wait(pause) and not job.output()[0]:
                    raise ConnectionRefusedError(f"nothing listens on port {port} inside the sandbox")
                pause = min(pause * 1.5, SLOWEST)
    except TimeoutError:
        raise OSError(f"no answer from port {port} inside the sandbox") from None
    except SandboxError as error:
        raise OSError(str(error)) from error


async def _carry(job: Job, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes both ways until one side ends."""
    up = asyncio.create_task(_upwards(job, reader))
    try:
        await _downwards(job, writer, up)
    except (OSError, SandboxError):
        pass  # either side is gone: so is the connection
    finally:
        up.cancel()
        writer.close()
        await _kill(job)


async def _upwards(job: Job, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError, SandboxError):
        while data := await reader.read(PIECE):
            await job.write(b"d " + base64.b64encode(data) + b"\n")


async def _downwards(job: Job, writer: asyncio.StreamWriter, up: asyncio.Task[None]) -> None:
    await job.write(b"a\n" * WINDOW)
    taken = len(b"+\n")
    line = b""
    pause = 0.001
    while True:
        ended = await job.wait(pause)
        kept, dropped = job.output()
        new = len(kept) + dropped - taken
        if dropped and new > OUTPUT_TAIL:
            raise OSError("the relay lost data")
        if new:
            taken += new
            *lines, line = (line + kept[len(kept) - new :]).split(b"\n")
            for piece in lines:
                if not piece:
                    return
                writer.write(base64.b64decode(piece))
            await writer.drain()
            if not ended and lines:
                await job.write(b"a\n" * len(lines))
            pause = 0.001
        elif ended or up.done():
            return
        else:
            pause = min(pause * 1.5, SLOWEST)


async def _kill(job: Job) -> None:
    with contextlib.suppress(SandboxError, OSError):
        await job.kill()
