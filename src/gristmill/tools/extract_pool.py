"""Child processes that read documents, so that a hostile or huge one costs a child and not the worker.

A document from the web may make a parser loop, or ask for all the memory there is. Threads could not be ended; a child
ends itself by alarm and by its own memory limit, and its parsing does not hold up the worker's loop. Children start
with the first document and are kept for the next ones; one whose worker is gone reads the end of its input and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec

from gristmill.tools.extract import Answer, Job, Page, Unreadable

CHILDREN = 2  # at once in one worker
SECONDS = 20.0  # of wall time a document
MEMORY = 2 << 30  # bytes of address space of one child


class ExtractPool:
    """Reads documents in a few processes; shared by the sessions of a worker, closed by it.

    Args:
        children: processes at once.
        seconds: wall time of one document.
        memory: address space of one child in bytes.
    """

    def __init__(self, children: int = CHILDREN, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._idle: list[Process] = []
        self._turns = asyncio.Semaphore(children)

    async def read(self, job: Job) -> Page:
        """The title and text of a document. Raises `Unreadable`."""
        async with self._turns:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await self._ask(child, job)
            except BaseException:  # cancelled or broken: nobody knows where in a frame it stands
                await _end(child)
                raise
            self._idle.append(child)
        if answer.page is None:
            raise Unreadable(answer.error)
        return answer.page

    async def close(self) -> None:
        """End the children; idempotent."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        # Only what it needs to find its modules: no key of the runner's environment reaches a parser.
        places = os.pathsep.join(str(Path(place).resolve()) for place in sys.path)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gristmill.tools.extract", str(self._seconds), str(self._memory)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={"PYTHONPATH": places, "LC_ALL": "C.UTF-8"},
            start_new_session=True,  # Ctrl-C is for the runner, which then ends it
        )

    async def _ask(self, child: Process, job: Job) -> Answer:
        assert child.stdin is not None
        assert child.stdout is not None
        data = msgspec.msgpack.encode(job)
        try:
            child.stdin.write(len(data).to_bytes(4, "big") + data)
            async with asyncio.timeout(self._seconds + 10):  # its own alarm comes first; this is for a stopped child
                await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(4), "big")
                return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=Answer)
        except (OSError, EOFError) as error:
            if not isinstance(error, TimeoutError):  # it has ended itself; killing it now would race with the news
                await child.wait()
            limits = f"{self._seconds:g} seconds and {self._memory >> 20} MiB"
            raise Unreadable(f"It could not be read within {limits}.") from None


async def _end(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    await asyncio.shield(child.wait())
