"""Many browser sessions at once in one worker: time to the first snapshot, memory per session, and what is left.

    python bench/browsers.py [--sessions 50] [--calls 3]

Each session gets its page from a server inside its own `local` sandbox, so the sandbox, the relay and the proxy are
part of the times. Memory is the proportional share (Pss) of Chromium's processes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from gristmill.sandbox.base import Sandbox, SandboxSpec
from gristmill.sandbox.bubblewrap import BubblewrapSandboxes
from gristmill.tools.base import ToolContext
from gristmill.tools.browser import BROWSER

TOOLS = {tool.name: tool for tool in BROWSER.tools}
PAGE = "<title>Page</title><h1>Hello</h1>" + "".join(f"<p>Line {n} <a href='/{n}'>link</a></p>" for n in range(100))


def chromium_memory() -> tuple[int, float]:
    """Number and Pss, in MiB, of the processes of Chromium below this one."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    count, total = 0, 0
    for pid in parents:
        above = pid
        while above > 1 and above != os.getpid():
            above = parents.get(above, 0)
        try:
            if above == os.getpid() and "/chrom" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
                count += 1
        except (OSError, StopIteration):
            continue
    return count, total / 1024


async def measure(sessions: int, calls: int) -> dict[str, Any]:
    sandboxes = BubblewrapSandboxes()
    shared: dict[str, Any] = {}
    shared_closers: list[Any] = []
    firsts: list[float] = []
    later: list[float] = []
    all_open = asyncio.Event()
    begun = time.monotonic()

    async def session(number: int) -> None:
        sandbox: Sandbox = sandboxes.make(SandboxSpec(session_id=f"s{number}", run_id="bench"))
        context = ToolContext(sandbox=sandbox, shared=shared, shared_closers=shared_closers)
        await sandbox.start()
        try:
            await sandbox.write("index.html", PAGE.encode())
            await sandbox.spawn("exec python3 -m http.server 8000 --bind 127.0.0.1")
            await sandbox.exec("until echo > /dev/tcp/127.0.0.1/8000; do sleep 0.1; done", timeout=60)
            for call in range(1 + calls):
                started = time.monotonic()
                result = await TOOLS["browser_navigate"].run(context, {"url": "http://localhost:8000/"})
                assert isinstance(result, dict) and result["success"] and "Hello" in result["snapshot"], result
                (later if call else firsts).append(time.monotonic() - started)
            if len(firsts) == sessions:
                all_open.set()
            await all_open.wait()
            peaks.append(chromium_memory()) if not peaks else None
        finally:
            for closer in reversed(context.closers):
                await closer()
            await sandbox.stop()

    peaks: list[tuple[int, float]] = []
    await asyncio.gather(*(session(number) for number in range(sessions)))
    empty = chromium_memory()
    for closer in shared_closers:
        await closer()
    sandboxes.close()
    processes, memory = peaks[0]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "sessions": sessions,
        "seconds": round(time.monotonic() - begun, 1),
        "first_snapshot_median_s": round(sorted(firsts)[sessions // 2], 2),
        "first_snapshot_fastest_s": round(min(firsts), 2),
        "first_snapshot_slowest_s": round(max(firsts), 2),
        "later_navigations_median_s": round(sorted(later)[len(later) // 2], 2) if later else 0.0,
        "worker_cpu_ms_per_call": round(1000 * (own.ru_utime + own.ru_stime) / (sessions * (1 + calls)), 1),
        "chromium_processes": processes,
        "chromium_mib": round(memory),
        "chromium_mib_per_session": round((memory - empty[1]) / sessions, 1),
        "chromium_mib_without_sessions": round(empty[1]),
        "processes_left": chromium_memory()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--calls", type=int, default=3, help="further navigations of each session")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.sessions, options.calls)), indent=1))


if __name__ == "__main__":
    main()
