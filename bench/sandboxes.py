"""What each kind of sandbox costs: start, one command, end, one after another, side by side in one run.

    python bench/sandboxes.py [--kinds local,host] [--rounds 20] [--image IMAGE]

Kinds that cannot work here say why. `docker` looks at DOCKER_HOST and needs --image, `ssh` looks at
TERMINAL_SSH_HOST and the like. CPU is that of this process and of its children that have ended, so what a container
engine or a remote host spends is not in it. Prints one JSON object; times in milliseconds, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time

from gristmill import plugins
from gristmill.config import sandbox_from_environment
from gristmill.sandbox.base import SandboxProvider, SandboxSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="local,host")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commands", type=int, default=20, help="commands of each sandbox after the first")
    parser.add_argument("--image", default="")
    options = parser.parse_args()
    print(json.dumps({kind: asyncio.run(measure(kind, options)) for kind in options.kinds.split(",")}, indent=1))


async def measure(kind: str, options: argparse.Namespace) -> dict[str, float | str]:
    """The medians of one kind, or why it cannot be measured."""
    settings = sandbox_from_environment(kind=kind).options
    made: type[SandboxProvider] = plugins.find("sandboxes", kind)
    if problem := made.problem(settings):
        return {"cannot": problem}
    provider = made(options=settings)
    taken: dict[str, list[float]] = {"start": [], "first_command": [], "command": [], "end": []}
    image = options.image if provider.capabilities.images else ""
    before = cpu()
    for turn in range(options.rounds):
        box = provider.make(SandboxSpec(session_id=f"bench-{turn}", run_id="bench", image=image))
        await timed(taken["start"], box.start())
        await timed(taken["first_command"], box.exec("true", timeout=60))
        for _ in range(options.commands):
            await timed(taken["command"], box.exec("true", timeout=60))
        await timed(taken["end"], box.stop())
    provider.close()
    figures: dict[str, float | str] = {f"{name}_ms": round(statistics.median(t), 2) for name, t in taken.items()}
    figures["cpu_ms_of_all"] = round(1000 * (cpu() - before) / options.rounds, 2)
    return figures


async def timed(into: list[float], work: object) -> None:
    """Await and note the milliseconds."""
    begun = time.perf_counter()
    await work  # type: ignore[misc]
    into.append(1000 * (time.perf_counter() - begun))


def cpu() -> float:
    """Seconds of this process and its ended children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
