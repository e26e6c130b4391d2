"""Events become the lines that users of the reference know, in their order."""

from __future__ import annotations

import msgspec
import pytest

from gristmill import events
from gristmill.cli.figures import clock_time, cut, money, short
from gristmill.cli.progress import Narrator
from gristmill.config import RunConfig
from gristmill.row_summary import RowSummary
from gristmill.stats import Facts, Fold
from gristmill.types import ErrorInfo, Usage


class Recorder:
    """A screen that remembers; live or not."""

    def __init__(self, live: bool = False) -> None:
        self.live = live
        self.lines: list[str] = []
        self.bottom = ""

    def write(self, text: str = "") -> None:
        self.lines += text.split("\n")

    def figures(self, text: str) -> None:
        self.bottom = text

    def close(self) -> None:
        self.bottom = ""


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config(**changes: object) -> RunConfig:
    return msgspec.structs.replace(RunConfig(dataset_file="p.jsonl", batch_size=2, run_name="r"), **changes)


PLAN = events.RunPlanned(
    dataset="p.jsonl",
    rows=5,
    refused=1,
    refusals=("line 3: it is not JSON",),
    sessions=4,
    samples=1,
    batch_size=2,
    batches=2,
    run_name="r",
    distribution="default",
    output_dir="data/r",
    workers=2,
    concurrency=8,
    seed=7,
    model="m",
    endpoint="http://127.0.0.1:1/v1",
    sandbox="local",
    filters=(),
    max_turns=10,
)


def ended(index: int, state: str = "kept", outcome: str = "completed", **more: object) -> events.SessionEnded:
    return msgspec.convert(
        {"prompt_index": index, "sample": 0, "batch": 0, "state": state, "outcome": outcome, **more},
        events.SessionEnded,
    )


def the_end() -> events.RunEnded:
    fold = Fold()
    fold.add(
        RowSummary(
            state="kept",
            outcome="completed",
            prompt_index=0,
            api_calls=3,
            tools={"read_file": (1, 1, 0), "terminal": (4, 3, 1)},
            reasoning=(3, 2, 1),
            usage=Usage(prompt_tokens=1200, completion_tokens=300, reasoning_tokens=50, cost_usd=0.25),
            duration_seconds=2.5,
        )
    )
    fold.add(RowSummary(state="discarded", outcome="completed", prompt_index=1, discarded="no_reasoning"))
    error = ErrorInfo(type="auth", message="HTTP 401: wrong key", status=401)
    fold.add(RowSummary(state="failed", outcome="model_error", prompt_index=2, error=error))
    statistics = fold.result(Facts(run_name="r", prompts=4, known_tools=("terminal", "read_file", "patch")))
    counts = statistics["reconcile"]
    names = ("sessions", "kept", "discarded", "filtered", "failed", "pending")
    return events.RunEnded(
        processed=3,
        seconds=65.2,
        merged_rows=1,
        merged_files=2,
        directory="data/r",
        files=("trajectories.jsonl", "statistics.json"),
        statistics=statistics,
        **{name: counts[name] for name in names},
    )


def test_a_whole_run_in_order() -> None:
    screen = Recorder()
    tell = Narrator(screen, config(), Clock())
    tell(PLAN)
    tell(events.BatchStarted(batch=0, prompts=2))
    tell(ended(0))
    tell(ended(1, "discarded", reason="no reasoning in any turn"))
    tell(events.BatchCompleted(batch=0, prompts=2))
    tell(ended(2, "failed", "model_error", reason="HTTP 401:\nwrong key"))
    tell(ended(3, outcome="session_timeout", partial=True))
    tell(events.Filtered(batch=1, filter="unknown_tool", reason="invalid tool 'frobnicate'"))
    tell(the_end())
    text = "\n".join(screen.lines)
    words = [
        "Dataset: p.jsonl (5 prompts)",
        "Rows refused: 1",
        "line 3: it is not JSON",
        "Batch size: 2",
        "Total batches: 2",
        "Run name: r",
        "Distribution: default",
        "Output directory: data/r",
        "Workers: 2",
        "Concurrency: 8",
        "Seed: 7",
        "Model: m (http://127.0.0.1:1/v1)",
        "Sandbox: local",
        "Filters: none",
        "🔄 Batch 0: Starting (2 prompts)",
        "✅ Prompt 0 completed",
        "🚫 Prompt 1 discarded (no reasoning in any turn)",
        "✅ Batch 0: Completed (2 prompts processed)",
        "❌ Prompt 2 failed: HTTP 401: wrong key (will retry on resume)",
        "⚠️  partial Prompt 3 completed (session_timeout)",
        "⚠️  Filtering corrupted entry (batch 1): invalid tool 'frobnicate'",
        "BATCH PROCESSING COMPLETE: 1 of 4",
        "Prompts processed this run: 3",
        "Total trajectories in merged file: 1",
        "Batch files merged: 2",
        "Total duration: 1:05",
        "Tool Usage Statistics",
        "Tool Name  Count  Success  Failure  Success Rate",
        "terminal       4        3        1         75.0%",
        "read_file      1        1        0        100.0%",
        "Reasoning Coverage",
        "Total assistant turns: 3",
        "With reasoning: 2 (66.7%)",
        "Without reasoning: 1 (33.3%)",
        "Samples discarded (zero reasoning): 1",
        "4 = 1 kept + 1 discarded + 0 filtered + 1 failed + 1 pending",
        "Tokens: 1.2K prompt, 300 completion (50 reasoning)",
        "≥ $0.2500",
        "Turns",
        "1 × auth 401: HTTP 401: wrong key",
        "data/r",
        "trajectories.jsonl",
    ]
    at = 0
    for word in words:
        assert word in text[at:], f"{word!r} is missing after {text[:at][-60:]!r}"
        at = text.index(word, at)
    assert "patch" not in text  # never called


def test_a_resumed_run() -> None:
    screen = Recorder()
    tell = Narrator(screen, config(), Clock())
    tell(events.Resumed(prompts=9, completed=6, owed=3, new_batches=2, changes=("model: a → b",)))
    tell(events.AllDone())
    assert screen.lines[1:7] == [
        "📊 RESUME SUMMARY",
        "   Original dataset size: 9 prompts",
        "   Already completed: 6 prompts",
        "   Resuming with: 3 prompts",
        "   New batches created: 2",
        "   Changed: model: a → b",
    ]
    assert screen.lines[-1] == "✅ All prompts have already been processed!"


def test_the_figures_of_a_terminal() -> None:
    screen, clock = Recorder(live=True), Clock()
    tell = Narrator(screen, config(), clock)
    tell(PLAN)
    clock.now += 30
    tell(ended(0, prompt_tokens=1500, completion_tokens=500, cost_usd=0.5))
    tell(events.Progress(in_flight=8, limit=3, refused=5))
    assert screen.bottom == (
        "1/4 prompts · 2.0/min · 8 in flight (endpoint takes 3) · 5 refused · 2K tokens · cost $0.5000 · ETA 1:30"
    )
    tell(ended(1, cost_known=False))
    assert "cost ≥ $0.5000" in screen.bottom


def test_a_pipe_gets_the_figures_as_a_line_now_and_then() -> None:
    screen, clock = Recorder(), Clock()
    tell = Narrator(screen, config(), clock)
    for _ in range(70):
        clock.now += 1
        tell(events.Progress(in_flight=1, limit=0))
    assert len([line for line in screen.lines if "in flight" in line]) == 2


def test_quiet_leaves_warnings_failures_and_one_closing_line() -> None:
    screen = Recorder()
    tell = Narrator(screen, config(verbosity="quiet"), Clock())
    for event in (
        PLAN,
        ended(0),
        events.Warned(text="No isolation."),
        ended(2, "failed", "model_error", reason="x"),
        the_end(),
    ):
        tell(event)
    assert screen.lines == [
        "⚠️  No isolation.",
        "❌ Prompt 2 failed: x (will retry on resume)",
        "📊 BATCH PROCESSING COMPLETE: 4 = 1 kept + 1 discarded + 0 filtered + 1 failed + 1 pending · data/r",
    ]


def test_verbose_shows_more_and_log_prefix_chars_how_much() -> None:
    screen = Recorder()
    reason = "r" * 50
    Narrator(screen, config(log_prefix_chars=10), Clock())(ended(2, "failed", "model_error", reason=reason))
    assert screen.lines == ["❌ Prompt 2 failed: rrrrrrrrr… (will retry on resume)"]
    screen = Recorder()
    tell = Narrator(screen, config(log_prefix_chars=10, verbosity="verbose"), Clock())
    tell(ended(2, "failed", "model_error", reason=reason, turns=3, seconds=1.5, prompt="p" * 20, prompt_tokens=7))
    assert screen.lines == [
        f"❌ Prompt 2 failed: {reason} (will retry on resume)",
        "   3 turns, 1.5 s, 7 tokens: ppppppppp…",
    ]


def test_samples_are_told_apart() -> None:
    screen = Recorder()
    Narrator(screen, config(samples_per_prompt=2), Clock())(ended(4))
    assert screen.lines == ["✅ Prompt 4 (sample 0) completed"]


def test_pauses_and_the_end_before_time() -> None:
    screen = Recorder()
    tell = Narrator(screen, config(), Clock())
    tell(events.Paused(reason="the account is empty", seconds=600))
    tell(events.Unpaused())
    tell(events.Stopping(reason="interrupted"))
    assert "the account is empty" in screen.lines[0] and "10:00" in screen.lines[0]
    assert "interrupted" in screen.lines[2] and "--resume" in screen.lines[2]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1K"), (12_345, "12.3K"), (4_560_000, "4.56M"), (10**10, "10B")]
)
def test_counts(number: int, text: str) -> None:
    assert short(number) == text


def test_money_times_and_long_texts() -> None:
    assert (money(0, True), money(0.00123, True), money(12.345, True)) == ("$0.00", "$0.0012", "$12.35")
    assert (money(0, False), money(1, False)) == ("unknown", "≥ $1.00")
    assert (clock_time(59.6), clock_time(3661)) == ("1:00", "1:01:01")
    assert (cut("a\n b", 10), cut("abcdef", 3), cut("abc", 3), cut("abc", 0)) == ("a b", "ab…", "abc", "abc")
