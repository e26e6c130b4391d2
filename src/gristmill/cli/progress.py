"""What a run says while it runs: events become lines, and on a terminal one live line below them."""

from __future__ import annotations

import time
from collections.abc import Callable

from gristmill import events
from gristmill.cli.console import Screen
from gristmill.cli.figures import clock_time, cut, money, short
from gristmill.cli.summary import closing_lines, closing_sentence
from gristmill.config import RunConfig
from gristmill.quality.filters import FILTERS

_EVERY = 30.0  # seconds between two lines of figures where there is no live display


class Tally:
    """What this invocation has done so far, folded from the events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began = clock()
        self.total = self.before = self.ended = self.tokens = self.in_flight = self.limit = self.refused = 0
        self.cost, self.cost_known = 0.0, True
        self.unit = "prompts"

    def count(self, event: events.SessionEnded) -> None:
        """Add an ended session."""
        self.ended += 1
        self.tokens += event.prompt_tokens + event.completion_tokens
        self.cost += event.cost_usd
        self.cost_known = self.cost_known and event.cost_known

    def __str__(self) -> str:
        minutes = max(self._clock() - self.began, 1e-9) / 60
        rate = self.ended / minutes
        parts = [f"{self.before + self.ended}/{self.total} {self.unit}", f"{rate:.1f}/min"]
        if self.in_flight:
            takes = f" (endpoint takes {self.limit})" if 0 < self.limit < self.in_flight else ""
            parts.append(f"{self.in_flight} in flight{takes}")
        if self.refused:
            parts.append(f"{self.refused} refused")
        parts.append(f"{short(self.tokens)} tokens")
        parts.append(f"cost {money(self.cost, self.cost_known)}")
        left = self.total - self.before - self.ended
        if self.ended and left > 0:
            parts.append(f"ETA {clock_time(60 * left / rate)}")
        return " · ".join(parts)


class Narrator:
    """Listens to a run and writes its lines. `quiet` leaves out all but warnings, failures and the closing sentence."""

    def __init__(self, screen: Screen, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._quiet = config.verbosity == "quiet"
        self._verbose = config.verbosity == "verbose"
        self._width = config.log_prefix_chars
        self._samples = config.samples_per_prompt
        self._clock = clock
        self._tally = Tally(clock)
        if self._samples > 1:
            self._tally.unit = "sessions"
        self._last_figures = clock()

    def __call__(self, event: events.Event) -> None:
        """Write what there is to say about an event."""
        match event:
            case events.RunPlanned():
                self._tally.total = event.sessions
                self._say(*plan_lines(event))
            case events.Resumed():
                self._tally.before = event.completed
                self._say("", *resume_lines(event))
            case events.AllDone():
                self._say("", "✅ All prompts have already been processed!")
            case events.BatchStarted():
                self._say(f"🔄 Batch {event.batch}: Starting ({event.prompts} prompts)")
            case events.BatchCompleted():
                self._say(f"✅ Batch {event.batch}: Completed ({event.prompts} prompts processed)")
            case events.SessionEnded():
                self._session(event)
            case events.Progress():
                self._tally.in_flight, self._tally.limit = event.in_flight, event.limit
                self._tally.refused = event.refused
                self._figures()
            case events.Warned():
                self._screen.write(f"⚠️  {event.text}")
            case events.Paused():
                self._screen.write(f"⏸️  Paused: {event.reason} (for {clock_time(event.seconds)} at most)")
            case events.Unpaused():
                self._screen.write("▶️  Going on")
            case events.Stopping():
                self._screen.write(f"🛑 Stopping: {event.reason}. Sessions in flight stay owed; --resume runs them.")
            case events.Merging():
                self._say("", f"🔄 Merging {event.files} batch files")
            case events.Filtered():
                self._say(filtered_line(event))
            case events.RunEnded():
                self._say("", *closing_lines(event))
                if self._quiet:
                    self._screen.write(closing_sentence(event))
            case _:
                pass

    def _say(self, *lines: str) -> None:
        if not self._quiet:
            self._screen.write("\n".join(lines))

    def _session(self, event: events.SessionEnded) -> None:
        self._tally.count(event)
        line = session_line(event, self._samples, 0 if self._verbose else self._width)
        if self._verbose:
            tokens = short(event.prompt_tokens + event.completion_tokens)
            line += f"\n   {event.turns} turns, {event.seconds:.1f} s, {tokens} tokens"
            line += f": {cut(event.prompt, self._width)}" if event.prompt else ""
        if event.state == "failed" or not self._quiet:
            self._screen.write(line)
        self._figures()

    def _figures(self) -> None:
        if self._quiet:
            return
        if self._screen.live:
            self._screen.figures(str(self._tally))
        elif self._clock() - self._last_figures >= _EVERY:
            self._last_figures = self._clock()
            self._screen.write(f"📊 {self._tally}")


def plan_lines(plan: events.RunPlanned) -> list[str]:
    """The summary of a run before it starts."""
    lines = [
        "📊 Gristmill run",
        f"   Dataset: {plan.dataset} ({plan.rows} prompts)",
        f"   Rows refused: {plan.refused}",
        *(f"      {refusal}" for refusal in plan.refusals[:20]),
        *([f"      … and {plan.refused - 20} more"] if plan.refused > 20 else []),
        f"   Batch size: {plan.batch_size}",
        f"   Total batches: {plan.batches}",
        f"   Run name: {plan.run_name}",
        f"   Distribution: {plan.distribution}",
        f"   Output directory: {plan.output_dir}",
        f"   Workers: {plan.workers}",
        f"   Concurrency: {plan.concurrency}",
        f"   Seed: {'drawn at the start' if plan.seed is None else plan.seed}",
        f"   Model: {plan.model} ({plan.endpoint or 'embedded'})",
        f"   Turns at most: {plan.max_turns}",
        f"   Sandbox: {plan.sandbox}",
        f"   Filters: {', '.join(plan.filters) or 'none'}",
    ]
    if plan.samples > 1:
        lines.insert(3, f"   Samples per prompt: {plan.samples} ({plan.sessions} sessions)")
    return lines


def resume_lines(resumed: events.Resumed) -> list[str]:
    """What a resumed run found."""
    return [
        "📊 RESUME SUMMARY",
        f"   Original dataset size: {resumed.prompts} prompts",
        f"   Already completed: {resumed.completed} prompts",
        f"   Resuming with: {resumed.owed} prompts",
        f"   New batches created: {resumed.new_batches}",
        *(f"   Changed: {change}" for change in resumed.changes),
    ]


def session_line(event: events.SessionEnded, samples: int, width: int) -> str:
    """The line of one ended session; `width` 0 shows a failure's reason in full."""
    prompt = f"Prompt {event.prompt_index}" + (f" (sample {event.sample})" if samples > 1 else "")
    if event.state == "discarded":
        return f"🚫 {prompt} discarded ({event.reason})"
    if event.state == "failed":
        return f"❌ {prompt} failed: {cut(event.reason, width) or event.outcome} (will retry on resume)"
    note = "" if event.outcome == "completed" else f" ({event.outcome})"
    return f"⚠️  partial {prompt} completed{note}" if event.partial else f"✅ {prompt} completed{note}"


def filtered_line(event: events.Filtered) -> str:
    """The line of a row that a merge filter left out."""
    known = FILTERS.get(event.filter)
    return f"⚠️  Filtering {known.drops if known else 'entry'} (batch {event.batch}): {event.reason}"
