"""Money, tokens and time of a whole run: no call starts that could pass the limit, and what is left is owed."""

from __future__ import annotations

import time

import pytest

from gristmill.testing.endpoint import ScriptedEndpoint, call, fail, say
from support.runs import Place

CENT = [call("write_file", {"path": "a", "content": "b"}, cost=0.01, reasoning="r")] * 20 + [say("done", cost=0.01)]


def spent(place: Place) -> float:
    return float(place.statistics()["cost_usd"])


def test_co_05_a_dollar_is_not_passed_by_64_sessions_in_flight(place: Place) -> None:
    """CO-05, CO-06: overshoot 0; nothing starts after the limit; exit 4; unstarted prompts are owed, not failed."""
    place.dataset(*(f"task {n}" for n in range(80)))
    with ScriptedEndpoint(CENT, latency=0.02).in_thread() as endpoint:
        printed = place.run(
            endpoint.url, "--max_cost=1.00", "--concurrency=64", "--num_workers=4", "--max_turns=30", status=4
        )
        assert endpoint.count <= 100
    assert spent(place) <= 1.0 + 1e-9
    assert spent(place) > 0.9
    assert "--max_cost" in printed
    counts = place.statistics()["reconcile"]
    assert counts["pending"] >= 16 and counts["sessions"] == 80
    assert {line["outcome"] for line in place.lines() if "failed" in line} <= {"budget"}


def test_co_06_calls_that_grow_dearer_do_not_pass_the_limit_either(place: Place) -> None:
    """CO-06: each turn costs a cent more than the one before; all sessions are at the same turn at the same time."""
    place.dataset(*(f"task {n}" for n in range(80)))
    turns = [call("write_file", {"path": "a", "content": "b"}, cost=0.01 * n, reasoning="r") for n in range(1, 20)]
    with ScriptedEndpoint(turns, latency=0.02).in_thread() as endpoint:
        place.run(endpoint.url, "--max_cost=1.00", "--concurrency=64", "--num_workers=2", "--max_turns=30", status=4)
    assert 0.9 < spent(place) <= 1.0 + 1e-9


def test_co_06_tokens_are_counted_after_every_call_over_all_workers(place: Place) -> None:
    """CO-06: each call reports 900 tokens; the limit of 5000 lets five calls through, over all workers."""
    turns = [call("write_file", {"path": "a", "content": "b"}, usage=(800, 100), reasoning="r")] * 5 + [say("done")]
    place.dataset(*(f"task {n}" for n in range(8)))
    with ScriptedEndpoint(turns).in_thread() as endpoint:
        place.run(endpoint.url, "--max_total_tokens=5000", "--num_workers=2", "--concurrency=8", status=4)
        assert endpoint.count == 5


def test_a_budget_counts_what_earlier_invocations_spent(place: Place) -> None:
    place.dataset(*(f"task {n}" for n in range(4)))
    turns = [say("done", cost=0.4, reasoning="r")]
    with ScriptedEndpoint(turns).in_thread() as endpoint:
        place.run(endpoint.url, "--max_cost=1.0", status=4)
        assert endpoint.count == 2
        place.run(endpoint.url, "--max_cost=1.0", "--resume", status=4)
        assert endpoint.count == 2
        place.run(endpoint.url, "--max_cost=5.0", "--resume")
        assert endpoint.count == 4
    assert len(place.merged()) == 4


def test_max_time_stops_cleanly(place: Place) -> None:
    place.dataset(*(f"task {n}" for n in range(30)))
    turns = [call("write_file", {"path": "a", "content": "b"}, reasoning="r")] * 3 + [say("done")]
    with ScriptedEndpoint(turns, latency=0.3).in_thread() as endpoint:
        begun = time.monotonic()
        place.run(endpoint.url, "--max_time=3", "--num_workers=1", "--concurrency=2", status=4)
        assert time.monotonic() - begun < 30
    counts = place.statistics()["reconcile"]
    assert 0 < counts["pending"] + counts["failed"] < 31 and counts["sessions"] == 30


def test_co_02_an_empty_account_pauses_the_run_and_goes_on_when_it_is_filled(place: Place) -> None:
    """CO-02: a 402 pauses everything, says so, probes, and goes on."""
    empty = fail(402, {"error": {"message": "Insufficient credits", "code": 402}})
    place.dataset(*(f"task {n}" for n in range(4)))
    turns = [say("done", reasoning="r").after(empty)]
    with ScriptedEndpoint(turns).in_thread() as endpoint:
        printed = place.run(endpoint.url, "--num_workers=1", "--concurrency=2")
    assert "Insufficient credits" in printed
    assert len(place.merged()) == 4


@pytest.mark.parametrize("limit", ["3"])
def test_co_02_an_account_that_stays_empty_stops_the_run(place: Place, limit: str) -> None:
    """CO-02: after --pause_limit the run stops with exit 4; nothing is marked as done."""
    empty = fail(402, {"error": {"message": "Insufficient credits", "code": 402}})
    place.dataset(*(f"task {n}" for n in range(20)))
    with ScriptedEndpoint([empty]).in_thread() as endpoint:
        printed = place.run(endpoint.url, f"--pause_limit={limit}", "--num_workers=2", "--concurrency=4", status=4)
        assert endpoint.count < 20
    assert "Insufficient credits" in printed
    counts = place.statistics()["reconcile"]
    assert counts["kept"] == 0 and counts["pending"] >= 16
