"""What the runner and a worker process say to each other: length-prefixed msgpack frames over a socket pair.

```
runner → worker   Begin (once) · Lease · Granted · Stop · Finish
worker → runner   Ready (once) · Done · Lost · Reserve · Settle · OutOfCredit · CreditBack · Beat
```
A frame is 4 bytes of length, big-endian, then the message. A closed socket is the death of the other side.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from gristmill.config import RunConfig
from gristmill.errors import StoreError
from gristmill.session.spec import Finished, SessionSpec
from gristmill.types import Usage

MAX_FRAME = 1 << 30


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Begin(Frame, frozen=True, array_like=True, tag=True):
    """All that a worker needs to make its kit."""

    config: RunConfig
    run_id: str
    seed: int
    known_tools: tuple[str, ...]
    toolsets: tuple[str, ...]  # that work here, by name
    mcp: bytes  # the MCP servers as msgpack, empty where there are none; `offer` knows their form
    workers: int  # at most, all of them
    slots: int  # sessions at most in this worker
    budgeted: bool  # reservations must be asked for


class Lease(Frame, frozen=True, array_like=True, tag=True):
    """Run this session."""

    id: int
    spec: SessionSpec


class Granted(Frame, frozen=True, array_like=True, tag=True):
    """The answer to `Reserve` or `OutOfCredit`: go on, or end the session as `budget` for this reason."""

    id: int
    refusal: str


class Stop(Frame, frozen=True, array_like=True, tag=True):
    """End all sessions now and record them with this outcome."""

    outcome: str


class Finish(Frame, frozen=True, array_like=True, tag=True):
    """No further session comes: end when the last one has."""


class Ready(Frame, frozen=True, array_like=True, tag=True):
    """The kit is made."""

    pid: int


class Broken(Frame, frozen=True, array_like=True, tag=True):
    """The kit could not be made; a sentence and its mend."""

    message: str
    mend: str


class Done(Frame, frozen=True, array_like=True, tag=True):
    """The session of this lease has ended."""

    id: int
    finished: Finished


class Lost(Frame, frozen=True, array_like=True, tag=True):
    """The session of this lease was stopped before anything of it could be kept."""

    id: int


class Reserve(Frame, frozen=True, array_like=True, tag=True):
    """May one more model call be made?"""

    id: int


class Settle(Frame, frozen=True, array_like=True, tag=True):
    """A reserved call has ended with this usage; None where it gave no answer."""

    usage: Usage | None


class OutOfCredit(Frame, frozen=True, array_like=True, tag=True):
    """The endpoint answered 402; `Granted` says when to try again."""

    id: int
    message: str


class CreditBack(Frame, frozen=True, array_like=True, tag=True):
    """After `OutOfCredit`, a call was answered."""


class Beat(Frame, frozen=True, array_like=True, tag=True):
    """The worker's loop turns. `limit` is how many requests its endpoint takes at present, 0 where unknown;
    `refused` is how many it has refused so far, for it was asked too much."""

    in_flight: int
    limit: int
    refused: int


ToWorker = Begin | Lease | Granted | Stop | Finish
ToRunner = Ready | Broken | Done | Lost | Reserve | Settle | OutOfCredit | CreditBack | Beat

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_TO_RUNNER: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)


def encode(frame: Frame) -> bytes:
    """The bytes of one frame, prefix included."""
    data = _ENCODER.encode(frame)
    return struct.pack(">I", len(data)) + data


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        head = await reader.readexactly(4)
        (length,) = struct.unpack(">I", head)
        if length > MAX_FRAME:
            raise StoreError(
                f"A frame of {length} bytes came from the other process.", "This is a bug; please report it."
            )
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def read_for_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """The runner's next frame; None when it is gone."""
    data = await _read(reader)
    return None if data is None else _TO_WORKER.decode(data)


async def read_for_runner(reader: asyncio.StreamReader) -> ToRunner | None:
    """The worker's next frame; None when it is gone."""
    data = await _read(reader)
    return None if data is None else _TO_RUNNER.decode(data)
