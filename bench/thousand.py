"""Many sessions at once in one worker: memory per session, lag of the event loop, CPU per turn.

    python bench/thousand.py [--sessions 1000] [--sandboxes 200] [--latency 2] [--turns 20]

A real worker process with a probe beside its loop, given leases as the runner gives them; the model's server is a
process of its own and not counted. First every turn calls a tool that needs no sandbox; then, with fewer sessions,
every turn runs a command in the session's bubblewrap sandbox. Lag and memory are taken while at least four fifths of
the sessions wait for the model. Since every answer takes equally long, they come in waves, which is the worst for lag;
`waited_for_a_core_percent` is what other processes of the machine add to it. Prints one JSON object for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from gristmill.build import make_kit
from gristmill.config import ModelConfig, RunConfig
from gristmill.run import frames
from gristmill.run.budget import Budget
from gristmill.run.processes import ProcessExecutor
from gristmill.run.serve import serve
from gristmill.run.worker import Kit
from gristmill.session.record import Gate
from gristmill.session.spec import Finished, SessionSpec
from gristmill.session.summary import RowShape, lost_session
from gristmill.task import Task

TICK = 0.01  # seconds between two looks of the probe
PAGE = os.sysconf("SC_PAGE_SIZE")


class Probe:
    """Beside the worker's loop: how late its timers are, and how much memory and CPU the process takes."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._kit: Kit | None = None
        self._lags: list[float] = []
        self._idle = self._most = 0
        self._waited = self._full = 0.0  # nanoseconds: ready but not running, and in all, while the worker was full
        self._begun = (0.0, 0.0)

    def make_kit(self, begin: frames.Begin, gate: Gate) -> Kit:
        self._kit = make_kit(begin, gate)
        self._idle, self._begun = _memory(), (_cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN))
        return self._kit

    async def watch(self) -> None:
        while True:
            begun, waited = time.perf_counter(), _waited()
            await asyncio.sleep(TICK)
            load = self._kit.model.load if self._kit is not None else None
            if load is not None and load.in_flight >= 0.8 * self._sessions:
                took = time.perf_counter() - begun
                self._lags.append(took - TICK)
                self._waited, self._full = self._waited + _waited() - waited, self._full + 1e9 * took
                if len(self._lags) % 50 == 1:
                    self._most = max(self._most, _memory())

    def figures(self) -> dict[str, float]:
        lags = sorted(self._lags) or [float("nan")]
        return {
            "idle_mib": round(self._idle / 2**20, 1),
            "kib_per_session": round((self._most - self._idle) / 1024 / self._sessions, 1),
            "lag_ms_p50": round(1000 * lags[len(lags) // 2], 2),
            "lag_ms_p99": round(1000 * lags[len(lags) * 99 // 100], 2),
            "lag_ms_max": round(1000 * lags[-1], 2),
            "seconds_full": round(len(lags) * TICK + sum(lags), 1),
            "waited_for_a_core_percent": round(100 * self._waited / max(1.0, self._full), 1),
            "worker_cpu": _cpu(resource.RUSAGE_SELF) - self._begun[0],
            "commands_cpu": _cpu(resource.RUSAGE_CHILDREN) - self._begun[1],
        }


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _waited() -> int:
    """Nanoseconds that this thread was ready to run while others had the cores."""
    return int(Path("/proc/self/schedstat").read_text().split()[1])


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


async def work(sessions: int, report: str, fd: int) -> None:
    """The worker process."""
    probe = Probe(sessions)
    watching = asyncio.create_task(probe.watch())
    await serve(fd, probe.make_kit)
    watching.cancel()
    Path(report).write_text(json.dumps(probe.figures()))


async def measure(options: argparse.Namespace, sessions: int, place: Path, *, sandbox: bool) -> dict[str, Any]:
    """All sessions at once, each with all its turns."""
    tool, argument = ("terminal", {"command": "echo one; ls"}) if sandbox else ("note", {"text": "one"})
    script: list[dict[str, Any]] = [{"reasoning": "A step.", "call": tool, "arguments": argument}] * (options.turns - 1)
    (place / "script.json").write_text(json.dumps([*script, {"text": "Done.", "reasoning": "All is there."}]))
    (place / "bench_tools.py").write_text(
        'def note(text: str) -> dict[str, int]:\n    """Take a note."""\n    return {"length": len(text)}\n'
    )
    server = start_server(place / "script.json", options.latency)
    assert server.stdout is not None
    os.chdir(place)
    config = RunConfig(
        dataset_file="none",
        batch_size=1,
        run_name="bench",
        filters=(),
        tools=("bench_tools:note",),
        max_turns=options.turns + 1,
        model=ModelConfig(name="scripted", base_url=server.stdout.readline().strip()),
    )
    toolset = "terminal" if sandbox else "bench_tools:note"
    begin = frames.Begin(
        config=config,
        run_id=f"bench-{os.getpid()}",
        seed=1,
        known_tools=(tool,),
        toolsets=(toolset,),
        mcp=b"",
        workers=1,
        slots=sessions,
        budgeted=False,
    )
    shape = RowShape(model="scripted", known_tools=(tool,))
    executor = ProcessExecutor(
        begin,
        workers=1,
        concurrency=sessions,
        command=[sys.executable, __file__, "--worker", str(sessions), str(place / "report.json")],
        lost=lambda spec, reason: lost_session(spec, reason, shape),
        budget=Budget(),
    )
    begun = time.monotonic()
    ended: list[Finished] = []
    try:
        async for finished in executor.run(specs(sessions, toolset), lambda spec: None):
            ended.append(finished)
        seconds = time.monotonic() - begun
    finally:
        await executor.close()
        server.terminate()
        server.wait()
    wrong = [finished.reason for finished in ended if finished.outcome != "completed"]
    if wrong:
        raise SystemExit(f"{len(wrong)} sessions did not complete: {wrong[0]}")
    found = json.loads((place / "report.json").read_text())
    turns = sum(finished.turns for finished in ended)
    worker, commands = found.pop("worker_cpu"), found.pop("commands_cpu")
    return {
        "sessions": sessions,
        "sandbox": "local" if sandbox else "none used",
        "latency": options.latency,
        "turns": turns,
        "seconds": round(seconds, 1),
        **found,
        "worker_cpu_ms_per_turn": round(1000 * worker / turns, 2),
        "commands_cpu_ms_per_turn": round(1000 * commands / turns, 2),
    }


def start_server(script: Path, latency: float) -> subprocess.Popen[str]:
    """The model's endpoint; its first line is its URL."""
    command = [sys.executable, "-m", "gristmill.testing.endpoint", "--script", str(script), "--latency", str(latency)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def specs(count: int, toolset: str) -> Iterator[SessionSpec]:
    """So many sessions."""
    for index in range(count):
        yield SessionSpec(
            task=Task(index=index, line=index + 1, key=f"key {index}", text=f"Task {index}."),
            sample=0,
            batch=0,
            attempt=1,
            toolsets=(toolset,),
            probability=1.0,
            seed=1,
        )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        uvloop.run(work(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--sandboxes", type=int, default=200, help="sessions of the part with sandboxes")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds of an answer of the model")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    found = []
    for sessions, sandbox in ((options.sessions, False), (options.sandboxes, True)):
        if sessions:
            with tempfile.TemporaryDirectory() as name:
                found.append(uvloop.run(measure(options, sessions, Path(name), sandbox=sandbox)))
                os.chdir("/")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
