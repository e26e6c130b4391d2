"""Byte streams to programs that Modal's SDK runs in a sandbox: `ContainerProcess` with its own stdin and stdout.

Source: Modal SDK reference, `Sandbox.exec`, `StreamReader`, `StreamWriter`. A program cannot be killed there; its stdin
can be ended, which is the end of every program of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import modal

from gristmill.sandbox.stream import Receiver

PIECE_BYTES = 4 << 20  # that are written at once; the SDK takes 16 MiB
WRITE_BYTES = 1 << 20  # that may wait to be written before a writer is held up
QUIET_SECONDS = 0.5  # after the end of a program, for what it has printed
SAID_SECONDS = 2.0  # for what a program said on stderr that printed nothing else
ERRORS = (modal.exception.Error, OSError, ValueError)  # it raises ValueError where a stdin has ended


class ModalStream:
    """stdin of a program; its stdout goes to the receiver."""

    def __init__(self, process: Any, receiver: Receiver) -> None:
        self._process = process
        self._receiver = receiver
        self._waiting = bytearray()
        self._ending = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._reading = asyncio.Event()
        self._reading.set()
        self._heard = 0  # pieces of its output
        self._reader = asyncio.ensure_future(self._read())
        self._others = [asyncio.ensure_future(work) for work in (self._write(), self._watch())]

    def write(self, data: bytes) -> None:
        if not self._ending:
            self._waiting += data
            if len(self._waiting) > WRITE_BYTES:
                self._drained.clear()
            self._wake.set()

    async def drain(self) -> None:
        await self._drained.wait()

    def write_eof(self) -> None:
        self._ending = True
        self._wake.set()

    def pause(self) -> None:
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def close(self) -> None:
        self.write_eof()
        self._reader.cancel()

    async def _read(self) -> None:
        reason = ""
        try:
            async for piece in self._process.stdout:
                await self._reading.wait()
                self._heard += 1
                self._receiver.take(piece)
            if not self._heard:
                async with asyncio.timeout(SAID_SECONDS):
                    reason = (await self._process.stderr.read.aio()).decode(errors="replace").strip()
        except ERRORS as error:
            reason = str(error)
        finally:
            self._others[1].cancel()
            if self._ending:
                # Its end of file may be on the way.
                asyncio.get_running_loop().call_later(QUIET_SECONDS, self._others[0].cancel)
            else:
                self._others[0].cancel()
            self._drained.set()
            self._receiver.ended(reason)

    async def _write(self) -> None:
        stdin = self._process.stdin
        with contextlib.suppress(*ERRORS):  # it has ended, which its stdout tells
            while not self._ending or self._waiting:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    stdin.write(bytes(self._waiting[:PIECE_BYTES]))
                    del self._waiting[:PIECE_BYTES]
                    await stdin.drain.aio()
                    if len(self._waiting) <= WRITE_BYTES:
                        self._drained.set()
            stdin.write_eof()
            await stdin.drain.aio()
        self._drained.set()

    async def _watch(self) -> None:
        """End when the program has, also where others still hold its output."""
        try:
            await self._process.wait.aio()
        except ERRORS:
            return  # whether it has ended cannot be known
        heard = -1
        while heard != self._heard or not self._reading.is_set():
            heard = self._heard
            await asyncio.sleep(QUIET_SECONDS)
        self._reader.cancel()
