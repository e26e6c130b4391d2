"""Bug cases of cost and limits in whole runs; those of budgets of money and tokens are in `run/test_budgets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gristmill import build
from gristmill.config import ModelConfig, RunConfig
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, fail, say
from support.cases import CASES, Answers, CaseRun, turns
from support.runs import Place

DONE = Turn(body=CASES["MR-01"][-1])  # 15 tokens


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_mr_37_the_turn_limit_ends_in_the_middle_of_tool_use(place: Place) -> None:
    script = Answers({"MR-37": turns("MR-37")})
    place.dataset("MR-37")
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, "--max_turns=2", "--filters=none", "--num_workers=1")
        run = CaseRun(place, script, endpoint.url)
    row = run.rows["MR-37"]
    assert (row["outcome"], row["completed"], row["partial"], row["api_calls"]) == ("turn_limit", False, False, 2)
    assert [r["output"] for r in run.results("MR-37")] == ["1\n", "2\n"]  # no call is left without a result
    assert row["conversations"][-1]["from"] == "tool"
    assert len(script.requests["MR-37"]) == 2  # no summary is asked for


def test_co_08_the_turn_limit_is_no_success(place: Place) -> None:
    script = Answers({"CO-08": turns("CO-08"), "plain": [DONE]})
    place.dataset(*script.answers)
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, "--max_turns=1", "--filters=none", "--num_workers=1")
        run = CaseRun(place, script, endpoint.url)
        assert run.rows["CO-08"]["completed"] is False and run.rows["plain"]["completed"] is True
        assert run.statistics["outcomes"] == {"completed": 1, "turn_limit": 1}
        assert "turn_limit" in printed
        # It counts as done, and is run again where the user says so.
        place.run(endpoint.url, "--max_turns=1", "--filters=none", "--num_workers=1", "--resume")
        assert len(script.requests["CO-08"]) == 1
        flags = ("--max_turns=2", "--filters=none", "--num_workers=1", "--resume", "--allow_changes")
        place.run(endpoint.url, *flags, "--retry=turn_limit")
    assert len(script.requests["CO-08"]) == 2 and len(script.requests["plain"]) == 1
    assert {row["outcome"] for row in place.merged()} == {"completed"} and len(place.merged()) == 2


def test_co_02_a_key_that_stops_working_stops_the_run(place: Place) -> None:
    """CO-02: a 401 after it worked: what runs may end, nothing new is started, the rest is owed."""
    asked = [0]

    def script(request: dict[str, Any], headers: Mapping[str, str]) -> Turn:
        asked[0] += 1
        return DONE if asked[0] <= 5 or asked[0] > 1000 else fail(401, {"error": {"message": "key revoked"}})

    place.dataset(*(f"task {n}" for n in range(50)))
    flags = ("--filters=none", "--num_workers=2", "--concurrency=4")
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, *flags, status=1)
        assert asked[0] <= 5 + 2 * 4
        assert "❌ Fatal error: " in printed and "key revoked" in printed and "Check the API key" in printed
        counts = place.statistics()["reconcile"]
        assert counts["kept"] == 5 and counts["pending"] >= 37
        assert {line["outcome"] for line in place.lines() if line.get("failed")} == {"model_error"}
        asked[0] = 1000
        place.run(endpoint.url, *flags, "--resume")
    assert asked[0] == 1045 and len(place.merged()) == 50


def test_co_03_co_04_co_09_failures_are_told_apart_and_bounded(place: Place) -> None:
    bad = fail(400, {"error": {"message": "messages: field required"}})
    script = Answers(
        {
            "CO-03": turns("CO-03"),
            "CO-03 another 400": [bad, bad, DONE],
            "CO-04": turns("CO-04"),
            "CO-09": [fail(500, "oops"), fail(500, "oops"), DONE],
        }
    )
    place.dataset(*script.answers)
    flags = ("--filters=none", "--num_workers=1")
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, *flags, status=3)
        run = CaseRun(place, script, endpoint.url)
        row = run.rows["CO-03"]
        assert (row["outcome"], row["partial"], row["api_calls"]) == ("context_overflow", True, 1)
        assert [turn["from"] for turn in row["conversations"]] == ["system", "human", "gpt", "tool"]
        assert len(script.requests["CO-03"]) == 2  # not tried again
        assert "maximum context length is 8192" in run.records["CO-03"]["reason"]

        assert [a["status"] for a in run.attempts("CO-04")] == [413, 529, 503]
        assert "<html>busy</html>" in run.attempts("CO-04")[2]["error"]
        assert run.rows["CO-04"]["outcome"] == "completed"

        # CO-09: failed requests are in the record, and no turn of the session.
        assert [a["status"] for a in run.attempts("CO-09")] == [500, 500]
        assert (run.rows["CO-09"]["api_calls"], run.records["CO-09"]["attempt"]) == (1, 1)

        failure = run.failures["CO-03 another 400"]
        assert (failure["outcome"], failure["attempt"], failure["error"]["type"]) == ("model_error", 1, "permanent")
        assert "HTTP 400: messages: field required" in failure["error"]["message"]
        assert run.statistics["outcomes"] == {"completed": 2, "context_overflow": 1, "model_error": 1}
        assert run.statistics["failures_by_reason"] == {"permanent 400": 1}

        # CO-09: attempts count over all invocations; a resume runs what failed, and that alone.
        place.run(endpoint.url, *flags, "--resume", status=3)
        assert [line["attempt"] for line in place.lines() if line.get("failed")] == [1, 2]
        place.run(endpoint.url, *flags, "--resume")
        run = CaseRun(place, script, endpoint.url)
    assert run.records["CO-03 another 400"]["attempt"] == 3
    assert {case: len(requests) for case, requests in script.requests.items()} == {
        "CO-03": 2,
        "CO-03 another 400": 3,
        "CO-04": 4,
        "CO-09": 3,
    }
    assert run.statistics["outcomes"] == {"completed": 3, "context_overflow": 1}


def test_co_05_no_prompt_starts_after_the_token_limit(place: Place) -> None:
    script = Answers({f"task {n}": [DONE] for n in range(50)})
    place.dataset(*script.answers)
    flags = ("--filters=none", "--num_workers=2", "--concurrency=4")
    with ScriptedEndpoint(script).in_thread() as endpoint:
        printed = place.run(endpoint.url, *flags, "--max_total_tokens=100", status=4)
        assert endpoint.count == 6  # of 15 tokens each
        assert "--max_total_tokens 100 is used up (90 used)" in printed
        counts = place.statistics()["reconcile"]
        assert counts["kept"] == 6 and counts["pending"] >= 40
        assert {line["outcome"] for line in place.lines() if line.get("failed")} <= {"budget"}
        place.run(endpoint.url, *flags, "--resume")
        assert endpoint.count == 50
    assert len(place.merged()) == 50


async def test_co_04_mr_32_mr_33_an_endpoint_that_stays_broken_fails_the_session_and_says_how(place: Place) -> None:
    """After the last try the failure's text shows status and body; the prompt is owed, and done on resume."""
    broken = {
        "CO-04": fail(503, "<html>busy</html>"),
        "MR-32": fail(200, "<html>captive portal</html>"),
        "MR-33": Turn(events=tuple(CASES["MR-33"])),
        "MR-29": fail(200, {"error": {"message": "Provider returned error", "code": 502}}),
    }
    script = Answers({name: [turn, turn, say("done")] for name, turn in broken.items()})
    place.dataset(*script.answers)
    async with ScriptedEndpoint(script) as endpoint:
        config = RunConfig(
            dataset_file=str(place.root / "prompts.jsonl"),
            batch_size=5,
            run_name="r",
            output_dir=str(place.root / "data"),
            distribution="terminal_only",
            filters=(),
            model=ModelConfig(name="scripted", base_url=endpoint.url, stream=True, max_retries=1),
        )
        runner = await build.make_runner(config, lambda event: None, in_process=True)
        assert (await runner.run()).exit_status == 3
        assert place.merged() == []
        run = CaseRun(place, script, endpoint.url)
        for name, status, words in (
            ("CO-04", 503, "HTTP 503: <html>busy</html>"),
            ("MR-32", 200, "HTTP 200: not JSON: <html>captive portal</html>"),
            ("MR-33", 200, "the stream ended without a finish reason"),
            ("MR-29", 502, "Provider returned error"),
        ):
            error = run.failures[name]["error"]
            assert error["status"] == status and words in error["message"]
            assert len(run.records[name]["failed_requests"]) == 2
        again = await build.make_runner(
            RunConfig(**{**config_fields(config), "resume": True}), lambda event: None, in_process=True
        )
        assert (await again.run()).exit_status == 0
    assert {row["outcome"] for row in place.merged()} == {"completed"} and len(place.merged()) == 4


def config_fields(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
