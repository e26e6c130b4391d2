"""How well the adaptive limit uses an endpoint that takes so many requests at once and answers 429 beyond.

    python bench/concurrency.py [--takes 40] [--latency 1.0 0.2] [--workers 4] [--concurrency 256] [--seconds 60]

A whole run against a server in a process of its own; every session calls a tool that needs no sandbox. Prints one JSON
object for each latency: `used_percent` is the mean of what the server had under way in the last third of the time, in
percent of what it takes; `refused_percent` is the share of 429 in all calls from the first one on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, fail, say

TURNS = 20  # of a session; the last one is its final answer


class Counter:
    """Takes `takes` requests at once and refuses the others; integrates how many were under way."""

    def __init__(self, takes: int, latency: float) -> None:
        self.takes, self.latency = takes, latency
        self.live = self.served = self.refused = 0
        self.area = self.seen = 0.0
        self.first = 0.0

    def __call__(self, request: dict[str, Any], headers: Any) -> Turn:
        self.first = self.first or time.monotonic()
        if self.live >= self.takes:
            self.refused += 1
            return fail(429, {"error": {"message": "Too many requests"}}, headers={"Retry-After": "1"})
        self.change(1)
        self.served += 1
        asyncio.get_running_loop().call_later(self.latency, self.change, -1)
        told = sum(1 for message in request["messages"] if message["role"] == "assistant")
        if told >= TURNS - 1:
            return say("Done.", reasoning="All is there.", latency=self.latency)
        return call("note", {"text": f"turn {told}"}, reasoning="One step.", latency=self.latency)

    def change(self, by: int) -> None:
        now = time.monotonic()
        self.area += self.live * (now - self.seen)
        self.seen = now
        self.live += by

    def sample(self) -> dict[str, float]:
        self.change(0)
        return {"at": self.seen, "area": self.area, "served": self.served, "refused": self.refused}


async def serve(takes: int, latency: float) -> None:
    """Serve until SIGTERM; the URL is the first line on stdout, the samples of each second are the second."""
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    counter, samples = Counter(takes, latency), []
    async with ScriptedEndpoint(counter, keep=0) as endpoint:
        print(endpoint.url, flush=True)
        while not ending.is_set():
            await asyncio.sleep(1.0)
            if counter.first:
                samples.append(counter.sample())
    print(json.dumps(samples), flush=True)


def measure(options: argparse.Namespace, latency: float, place: Path) -> dict[str, Any]:
    """One run of `--seconds`."""
    (place / "bench_tools.py").write_text(
        'def note(text: str) -> dict[str, int]:\n    """Take a note."""\n    return {"length": len(text)}\n'
    )
    count = int(2 * options.seconds * options.takes / latency / TURNS) + options.concurrency
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Task {n}."}) + "\n" for n in range(count)))
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--takes", str(options.takes), "--latency", str(latency)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    command = [
        sys.executable,
        "-m",
        "gristmill",
        "run",
        "--dataset_file=prompts.jsonl",
        "--batch_size=1000",
        "--run_name=bench",
        "--distribution=terminal_only",
        "--tools=bench_tools:note",
        f"--base_url={url}",
        "--model=scripted",
        f"--num_workers={options.workers}",
        f"--concurrency={options.concurrency}",
        f"--max_turns={TURNS + 1}",
        f"--max_time={options.seconds + 2}",
        "--quiet",
    ]
    try:
        done = subprocess.run(command, cwd=place, env=dict(os.environ), capture_output=True, text=True, check=False)
    finally:
        server.terminate()
    samples = json.loads(server.stdout.readline())
    server.wait()
    if done.returncode != 4:  # stopped by --max_time
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    samples = [sample for sample in samples if sample["at"] - samples[0]["at"] <= options.seconds]
    return {
        "takes": options.takes,
        "latency": latency,
        "workers": options.workers,
        "concurrency": options.concurrency,
        "seconds": round(samples[-1]["at"] - samples[0]["at"], 1),
        "calls": samples[-1]["served"] + samples[-1]["refused"],
        "refused": samples[-1]["refused"],
        "refused_percent": _refused(samples[0], samples[-1], from_start=True),
        "refused_percent_last_third": _refused(samples[-len(samples) // 3], samples[-1]),
        "used_percent": _used(samples[-len(samples) // 3], samples[-1], options.takes),
        "used_percent_from_start": _used(samples[0], samples[-1], options.takes),
    }


def _refused(first: dict[str, float], last: dict[str, float], *, from_start: bool = False) -> float:
    refused = last["refused"] - (0 if from_start else first["refused"])
    served = last["served"] - (0 if from_start else first["served"])
    return round(100 * refused / max(1, refused + served), 2)


def _used(first: dict[str, float], last: dict[str, float], takes: int) -> float:
    return round(100 * (last["area"] - first["area"]) / (last["at"] - first["at"]) / takes, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--takes", type=int, default=40, help="requests that the server takes at once")
    parser.add_argument("--latency", type=float, nargs="+", default=[1.0, 0.2], help="seconds of an answer")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.takes, options.latency[0]))
        return
    found = []
    for latency in options.latency:
        with tempfile.TemporaryDirectory() as name:
            found.append(measure(options, latency, Path(name)))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
