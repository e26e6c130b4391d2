"""CPU per turn and trajectories per minute of a whole run: scripted model, real sandboxes, all processes counted.

    python bench/turns.py [--prompts 300] [--turns 5] [--workers 4] [--sandbox local] [--concurrency N] [--latency S]

The model server runs in a process of its own and is not counted. The last turn is the final answer, so
`--turns 5` makes four terminal calls. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer of the model")
    parser.add_argument("--no_tools", action="store_true", help="a final answer in the first turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(options, Path(name)), indent=1))


def measure(options: argparse.Namespace, place: Path) -> dict[str, float]:
    """One run in `place`; CPU is of the runner and everything it started, from the kernel's accounting."""
    turns = 1 if options.no_tools else options.turns
    script = [call("terminal", {"command": f"echo turn {n}; ls"}) for n in range(turns - 1)]
    script.append({"text": "Done.", "reasoning": "All is there."})
    (place / "script.json").write_text(json.dumps(script))
    prompts = (json.dumps({"prompt": f"Task number {n}."}) for n in range(options.prompts))
    (place / "prompts.jsonl").write_text("\n".join(prompts))
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gristmill.testing.endpoint",
            "--script",
            str(place / "script.json"),
            "--port",
            "0",
            "--latency",
            str(options.latency),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    command = [sys.executable, "-m", "gristmill", *run_flags(options, place, url)]
    done = subprocess.run(command, cwd=place, env=dict(os.environ), capture_output=True, text=True, check=False)
    wall = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    server.terminate()
    server.wait()
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = sum(1 for _ in (place / "data/bench/trajectories.jsonl").open())
    return {
        "rows": rows,
        "turns": rows * turns,
        "seconds": round(wall, 2),
        "trajectories_per_minute": round(60 * rows / wall, 1),
        "cpu_seconds": round(cpu, 2),
        "cpu_ms_per_turn": round(1000 * cpu / (rows * turns), 2),
    }


def run_flags(options: argparse.Namespace, place: Path, url: str) -> list[str]:
    """The flags of the measured run."""
    return [
        "run",
        f"--dataset_file={place / 'prompts.jsonl'}",
        "--batch_size=50",
        "--run_name=bench",
        "--distribution=terminal_only",
        f"--base_url={url}",
        "--model=scripted",
        f"--num_workers={options.workers}",
        f"--concurrency={options.concurrency}",
        f"--sandbox={options.sandbox}",
        "--filters=none",
        "--quiet",
        "--max_turns=20",
    ]


def call(name: str, arguments: dict[str, str]) -> dict[str, object]:
    """A scripted turn that calls one tool."""
    return {"reasoning": "One step.", "call": name, "arguments": arguments}


if __name__ == "__main__":
    main()
