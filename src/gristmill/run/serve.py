"""The worker process's own side: take leases from the runner's socket, run them, send back what came of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from gristmill.errors import GristmillError
from gristmill.run import frames
from gristmill.run.worker import Kit, WorkerLoop
from gristmill.session.record import BudgetSpent
from gristmill.types import Outcome, Usage

BEAT_SECONDS = 2.0


class RemoteGate:
    """The budget as a session in a worker process sees it: asked over the socket."""

    def __init__(self, send: Callable[[frames.Frame], None], *, budgeted: bool) -> None:
        self._send = send
        self._budgeted = budgeted
        self._out_of_credit = False
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._next = 0

    async def reserve(self) -> None:
        """See `session.loop.Gate`."""
        if self._budgeted and (refusal := await self._ask(frames.Reserve)):
            raise BudgetSpent(refusal)

    def settle(self, usage: Usage | None) -> None:
        """See `session.loop.Gate`."""
        if self._budgeted:
            self._send(frames.Settle(usage))
        if self._out_of_credit and usage is not None:
            self._out_of_credit = False
            self._send(frames.CreditBack())

    async def out_of_credit(self, message: str) -> None:
        """See `session.loop.Gate`."""
        self._out_of_credit = True
        if refusal := await self._ask(lambda number: frames.OutOfCredit(number, message)):
            raise BudgetSpent(refusal)

    async def _ask(self, frame: Callable[[int], frames.Frame]) -> str:
        self._next += 1
        number = self._next
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._send(frame(number))
        try:
            return await future
        finally:
            del self._asked[number]

    def granted(self, number: int, refusal: str) -> None:
        """The runner's answer."""
        future = self._asked.get(number)
        if future is not None and not future.done():
            future.set_result(refusal)
        elif not refusal:
            self._send(frames.Settle(None))  # the session that asked is gone


async def serve(fd: int, make_kit: Callable[[frames.Begin, RemoteGate], Kit]) -> None:
    """The worker process: take leases from the socket `fd` until it says `Finish` or closes."""
    # The runner decides when to end; if it is gone, the socket closes. A handler and not SIG_IGN, which the commands
    # of the sandboxes would inherit.
    for sent in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sent, lambda: None)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 20)

    def send(frame: frames.Frame) -> None:
        if not writer.is_closing():
            writer.write(frames.encode(frame))

    begin = await frames.read_for_worker(reader)
    if not isinstance(begin, frames.Begin):
        return
    gate = RemoteGate(send, budgeted=begin.budgeted)
    try:
        kit = make_kit(begin, gate)
    except GristmillError as error:
        send(frames.Broken(error.message, error.mend))
        await writer.drain()
        return
    send(frames.Ready(os.getpid()))
    loop = WorkerLoop(
        kit, lambda number, finished: send(frames.Done(number, finished) if finished else frames.Lost(number))
    )
    beating = asyncio.create_task(_beat(loop, kit, send))
    try:
        while (frame := await frames.read_for_worker(reader)) is not None:
            match frame:
                case frames.Lease(id=number, spec=spec):
                    loop.start(number, spec)
                case frames.Granted(id=number, refusal=refusal):
                    gate.granted(number, refusal)
                case frames.Stop(outcome=outcome):
                    loop.stop(Outcome(outcome))
                case frames.Finish():
                    await loop.idle()
                    break
    finally:
        beating.cancel()
        await loop.abandon()
        await kit.close()
        writer.close()


async def _beat(loop: WorkerLoop, kit: Kit, send: Callable[[frames.Frame], None]) -> None:
    while True:
        send(frames.Beat(loop.in_flight, *kit.load()))
        await asyncio.sleep(BEAT_SECONDS)
