"""`gristmill run`: settings, a runner, a narrator, and the signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gristmill import build, events
from gristmill.cli.console import Lines, Screen
from gristmill.cli.figures import money
from gristmill.cli.parsing import lazily
from gristmill.cli.progress import Narrator, plan_lines
from gristmill.cli.settings import read_config, warnings
from gristmill.config import RunConfig
from gristmill.distribution import load_distributions, render_list
from gristmill.errors import GristmillError
from gristmill.model.pricing import Prices

try:
    import uvloop

    _new_loop: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
except ImportError:  # not on every platform
    _new_loop = None

_CALL_PROMPT, _CALL_COMPLETION = 4000, 400  # tokens of a call that an estimate takes for usual
_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def run(given: Mapping[str, Any]) -> int:
    """Run what the flags say; returns the exit status."""
    if given.get("list_distributions"):
        Lines(sys.stdout).write(render_list(load_distributions(given.get("distributions_file"))))
        return 0
    config = read_config(given)
    if given.get("dry_run"):
        return dry_run(config, warnings(given, config))
    return run_config(config, warnings(given, config)).exit_status


def run_config(config: RunConfig, warned: list[str]) -> events.RunReport:
    """Run, and say on stdout what happens. Raises `GristmillError` for what ends a run before its time."""
    screen = lazily("gristmill.cli.live:open_screen")(stream=sys.stdout) if sys.stdout.isatty() else Lines(sys.stdout)
    narrate = Narrator(screen, config)
    for text in warned:
        narrate(events.Warned(text=text))
    try:
        with asyncio.Runner(loop_factory=_new_loop) as loop:
            report = loop.run(_run(config, narrate, screen))
    finally:
        screen.close()
    if report.error:
        raise GristmillError(report.error, report.mend)
    return report


async def _run(config: RunConfig, narrate: Narrator, screen: Screen) -> events.RunReport:
    runner = await build.make_runner(config, narrate)
    loop = asyncio.get_running_loop()
    for number in _STATUS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` has SIGHUP ignored
            loop.add_signal_handler(number, _on_signal, number, runner.stop, screen)
    return await runner.run()


def _on_signal(number: signal.Signals, stop: Callable[[str, int], None], screen: Screen) -> None:
    """The first signal ends the run cleanly, a second one at once: what that leaves, the next start removes."""
    stop(f"interrupted by {number.name}", _STATUS[number])
    screen.write("   A second signal ends it at once.")
    asyncio.get_running_loop().add_signal_handler(number, _end_at_once, number, screen)


def _end_at_once(number: signal.Signals, screen: Screen) -> None:
    screen.close()
    os._exit(_STATUS[number])


def dry_run(config: RunConfig, warned: list[str]) -> int:
    """Check everything, print the plan; nothing is written and no prompt is sent."""
    lines = Lines(sys.stdout)
    plan = asyncio.run(build.check(config))
    prompts = len(plan.dataset.tasks)
    planned = events.RunPlanned.of(
        config,
        plan.dataset,
        batches=-(-prompts // config.batch_size),
        seed=config.seed,
        directory=str(Path(config.output_dir) / config.run_name),
    )
    for text in (*warned, *plan.warnings):
        lines.write(f"⚠️  {text}")
    for line in plan_lines(planned):
        lines.write(line)
    lines.write(f"   Toolsets: {', '.join(plan.offered)}")
    sessions = prompts * config.samples_per_prompt
    lines.write(f"   Model calls at most: {sessions * config.max_turns}")
    lines.write(f"   Cost estimate: {_estimate(config, sessions)}")
    lines.write("✅ Everything is there. No prompt was sent and nothing was written.")
    return 0


def _estimate(config: RunConfig, sessions: int) -> str:
    least = Prices(config.model).estimate(sessions * _CALL_PROMPT, sessions * _CALL_COMPLETION)
    if least is None:
        return "none, for no price of this model is known"
    if not least:
        return money(least, True)
    return (
        f"{money(least, True)} with one call a session, {money(least * config.max_turns, True)} with all of them "
        f"(for {_CALL_PROMPT} prompt and {_CALL_COMPLETION} completion tokens a call; caching makes it cheaper)"
    )
