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
        """See `session.record.Gate`."""
        if not self._budgeted:
            return
        answer = self._ask(frames.Reserve)
        try:
            refusal = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._give_back)
            raise
        if refusal:
            raise BudgetSpent(refusal)

    def settle(self, usage: Usage | None) -> None:
        """See `session.record.Gate`."""
        if self._budgeted:
            self._send(frames.Settle(usage))
        if self._out_of_credit and usage is not None:
            self._out_of_credit = False
            self._send(frames.CreditBack())

    async def out_of_credit(self, message: str) -> None:
        """See `session.record.Gate`."""
        self._out_of_credit = True
        if refusal := await asyncio.shield(self._ask(lambda number: frames.OutOfCredit(number, message))):
            raise BudgetSpent(refusal)

    def granted(self, number: int, refusal: str) -> None:
        """The runner's answer."""
        self._asked.pop(number).set_result(refusal)

    def _ask(self, frame: Callable[[int], frames.Frame]) -> asyncio.Future[str]:
        """Ask the runner. The answer comes also where the session that asked has gone meanwhile."""
        self._next += 1
        answer = self._asked[self._next] = asyncio.get_running_loop().create_future()
        self._send(frame(self._next))
        return answer

    def _give_back(self, answer: asyncio.Future[str]) -> None:
        if not answer.result():
            self._send(frames.Settle(None))


async def serve(fd: int, make_kit: Callable[[frames.Begin, RemoteGate], Kit]) -> None:
    """The worker process: take leases from the socket `fd` until it says `Finish` or closes."""
    # The runner decides when to end; if it is gone, the socket closes. A handler and not SIG_IGN, which the commands
    # of the sandboxes would inherit.
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
