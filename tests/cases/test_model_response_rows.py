"""Bug cases of model responses in whole runs: what each leaves in its row, in the statistics and for a resume.

`test_model_response` has the same cases where they arrive, in every variant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from gristmill.quality.base import FilterContext
from gristmill.quality.filters import FILTERS
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, calls, fail, say
from support.cases import CASES, OWN_TOOLS, Answers, CaseRun, turns
from support.runs import Place

VERBATIM = ("01", "03", "04", "05", "07", "09", "12", "14", "15", "16", "17", "22", "23", "24", "25", "27", "28")
FLAGS = ("--filters=none", "--tools=case_tools:TOOLS", "--concurrency=40", "--num_workers=2")
CUT_CALL = {"name": "terminal", "arguments": '{"command": "touch ran'}
ECHO = call("terminal", {"command": "echo goes on"})


def must_be_sent_back() -> list[Turn]:
    """MR-21; whether the second request is right is looked at afterwards."""
    first = call("terminal", {"command": "echo hi"}, reasoning="R", reasoning_field="reasoning")
    return [first, say("done"), fail(400, {"error": {"message": "too late"}})]


def answers() -> Answers:
    listed = {f"MR-{number}": turns(f"MR-{number}") for number in (*VERBATIM, "29", "30", "32", "34", "38")}
    listed |= {f"MR-19 {number}": [turn] for number, turn in enumerate(turns("MR-19"))}
    # As the case has it, `web_search` stands for any tool that only reads.
    (two, *rest) = turns("MR-25")
    listed["MR-25"] = [Turn(body=json.loads(json.dumps(two.body).replace("web_search", "look_up"))), *rest]
    no_objects = ["[]", '"ls"', "3", "true", '[{"command": "ls"}]']
    listed["MR-04 goes on"] = [
        calls(*(("terminal", raw) for raw in no_objects)),
        ECHO,
        say("done"),
    ]
    listed["MR-21"] = must_be_sent_back()
    listed["MR-29 permanent"] = [fail(200, {"error": {"message": "bad request", "code": 400}}), say("done")]
    return Answers(listed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRun]:
    place, script = Place(tmp_path_factory.mktemp("cases")), answers()
    (place.root / "case_tools.py").write_text(OWN_TOOLS)
    place.dataset(*script.answers)
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, *FLAGS, status=3)
        yield CaseRun(place, script, endpoint.url)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> CaseRun:
    place = Place(tmp_path_factory.mktemp("streams"))
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    done = Turn(text="done")
    listed = {f"MR-26 {name}": [Turn(events=(*events, end, "[DONE]")), done] for name, events in CASES["MR-26"].items()}
    listed["MR-18"] = [Turn(events=tuple(CASES["MR-18"]))]
    half = CASES["MR-33"]
    cut_call = [{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "a", "function": CUT_CALL}]}}]}]
    error = {"error": {"message": "upstream died", "code": 502}}
    listed["MR-33"] = [Turn(events=tuple(half)), say("whole")]
    listed["MR-33 call"] = [Turn(events=tuple(cut_call)), say("whole")]
    listed["MR-33 error"] = [Turn(events=(*half, error)), say("whole")]
    script = Answers(listed)
    (place.root / "case_tools.py").write_text(OWN_TOOLS)
    place.dataset(*script.answers)
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, *FLAGS, "--stream")
        return CaseRun(place, script, endpoint.url)


def test_mr_01_arguments_encoded_twice(run: CaseRun) -> None:
    assert [c["arguments"] for c in run.calls("MR-01")] == ['{"command":"echo hi"}']
    assert run.said("MR-01")[0].tool_calls[0].arguments == '{"command":"echo hi"}'
    assert [r["output"] for r in run.results("MR-01")] == ["hi\n"]
    assert run.counts("MR-01", "terminal") == (1, 1, 0)


def test_mr_03_arguments_that_are_null_absent_or_an_object(run: CaseRun) -> None:
    assert [c["arguments"] for c in run.calls("MR-03")] == ["{}", "{}", '{"command":"echo hi"}', "{}"]
    assert run.counts("MR-03", "todo_list") == (3, 3, 0) and run.counts("MR-03", "terminal") == (1, 1, 0)
    assert run.rows["MR-03"]["outcome"] == "completed"


def test_mr_04_arguments_that_are_json_but_no_object(run: CaseRun) -> None:
    raws = ["[]", '"ls"', "3", "true", '[{"command": "ls"}]']
    row = run.rows["MR-04 goes on"]
    assert [c["arguments"] for c in run.calls("MR-04 goes on")] == [*raws, '{"command":"echo goes on"}']
    *refused, fine = run.results("MR-04 goes on")
    assert all("must be one JSON object" in r["error"] for r in refused) and fine["output"] == "goes on\n"
    assert run.counts("MR-04 goes on", "terminal") == (6, 1, 5)
    assert row["tool_error_counts"]["terminal"] == 5 and row["outcome"] == "completed"
    # The case itself never calls anything valid: after three such turns in a row the session ends.
    assert run.rows["MR-04"]["outcome"] == "invalid_tool_calls" and run.rows["MR-04"]["partial"]
    assert run.counts("MR-04", "terminal") == (3, 0, 3)


@pytest.mark.parametrize(("case", "tool"), [("MR-05", "terminal"), ("MR-07", "read_file"), ("MR-09", "write_file")])
def test_mr_05_mr_07_mr_09_refused_arguments_stay_as_they_were_sent(run: CaseRun, case: str, tool: str) -> None:
    sent = CASES[case][0]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert [c["arguments"] for c in run.calls(case)] == [sent]
    assert run.said(case)[0].tool_calls[0].arguments == sent
    (result,) = run.results(case)
    assert ("truncated" if case == "MR-09" else "not valid JSON") in result["error"]
    assert run.counts(case, tool) == (1, 0, 1) and run.rows[case]["outcome"] == "completed"
    # The next request carries it as it was, too.
    assert run.answers.requests[case][1]["messages"][-2]["tool_calls"][0]["function"]["arguments"] == sent


def test_mr_12_an_empty_message_is_neither_an_end_nor_a_part_of_the_conversation(run: CaseRun) -> None:
    assert run.rows["MR-12"]["outcome"] == "completed"
    assert [bool(m.content or m.tool_calls) for m in run.said("MR-12")] == [True, True]
    requests = run.answers.requests["MR-12"]
    assert len(requests) == 4
    for message in (m for r in requests for m in r["messages"] if m["role"] == "assistant"):
        assert message.get("tool_calls") or message["content"].strip()
    assert run.rows["MR-12"]["api_calls"] == 2
    assert run.rows["MR-12"]["usage"]["completion_tokens"] == 20  # the unusable ones were paid for


def test_mr_14_content_is_a_list_of_parts(run: CaseRun) -> None:
    (message,) = run.said("MR-14")
    assert (message.content, message.reasoning) == ("The answer is 4.", "2+2")


def test_mr_15_closing_think_tag_without_an_opening_one(run: CaseRun) -> None:
    (message,) = run.said("MR-15")
    assert (message.content, message.reasoning) == ("Final answer: 4", "internal notes")
    assert run.rows["MR-15"]["conversations"][-1]["value"] == "<think>\ninternal notes\n</think>\nFinal answer: 4"


def test_mr_16_opening_think_tag_never_closed(run: CaseRun) -> None:
    row = run.rows["MR-16"]
    assert (row["outcome"], row["completed"], row["partial"]) == ("output_truncated", False, True)
    (message,) = run.said("MR-16")
    assert (message.content, message.reasoning) == ("", "step 1, step 2, step")
    assert row["conversations"][-1]["value"].count("</think>") == 1
    first, second = run.answers.requests["MR-16"]
    assert second["max_tokens"] > first.get("max_tokens", 0)


def test_mr_17_literal_think_tags_inside_reasoning_or_answer(run: CaseRun) -> None:
    (message,) = run.said("MR-17")
    assert message.content == "Use `<think>draft</think>` as an example."
    assert message.reasoning == "The user asks about </think> tags; I explain <think>."


def test_mr_18_think_tag_split_over_stream_chunks(streamed: CaseRun) -> None:
    (message,) = streamed.said("MR-18")
    assert (message.content, message.reasoning) == ("V1 <reasoning>R2</reasoning> V2", "R1")


def test_mr_19_reasoning_under_different_field_names(run: CaseRun) -> None:
    for number in range(6):
        row, (message,) = run.rows[f"MR-19 {number}"], run.said(f"MR-19 {number}")
        assert (message.content, message.reasoning) == ("a", "R" if number < 5 else "")
        assert row["reasoning_stats"]["turns_with_reasoning"] == 1  # the sixth is hidden, and not none


def test_mr_21_reasoning_must_be_sent_back(run: CaseRun) -> None:
    assert run.rows["MR-21"]["outcome"] == "completed"
    sent = run.answers.requests["MR-21"][1]["messages"][-2]
    assert (sent["reasoning"], sent["reasoning_content"]) == ("R", "R")


def test_mr_22_duplicate_call_ids_within_a_turn_and_across_turns(run: CaseRun) -> None:
    assert [r["output"] for r in run.results("MR-22")] == ["A\n", "B\n", "C\n"]
    ids = [c["id"] for c in run.calls("MR-22")]
    assert len(set(ids)) == 3
    last = run.answers.requests["MR-22"][-1]["messages"]
    assert [m["tool_call_id"] for m in last if m["role"] == "tool"] == ids
    assert [c["id"] for m in last for c in m.get("tool_calls") or ()] == ids
    assert run.counts("MR-22", "terminal") == (3, 3, 0)


def test_mr_23_empty_or_null_call_ids(run: CaseRun) -> None:
    ids = [c["id"] for c in run.calls("MR-23")]
    assert all(ids) and len(set(ids)) == 2
    assert [r["output"] for r in run.results("MR-23")] == ["A\n", "B\n"]
    assert run.counts("MR-23", "terminal") == (2, 2, 0)


def test_mr_24_the_same_call_in_every_round(run: CaseRun) -> None:
    row = run.rows["MR-24"]
    assert (row["outcome"], row["completed"], row["api_calls"]) == ("turn_limit", False, 10)
    assert run.counts("MR-24", "terminal") == (10, 10, 0)
    assert len({c["id"] for c in run.calls("MR-24")}) == 10
    assert len(run.answers.requests["MR-24"]) == 10


def test_mr_25_the_same_tool_twice_in_one_turn(run: CaseRun) -> None:
    assert run.results("MR-25") == [{"found": "X"}, {"found": "Y"}]
    assert run.counts("MR-25", "look_up") == (2, 2, 0)


def test_mr_26_stream_deltas_with_missing_equal_null_or_drifting_index(streamed: CaseRun) -> None:
    for variant in CASES["MR-26"]:
        found = [(c["name"], c["arguments"]) for c in streamed.calls(f"MR-26 {variant}")]
        assert found == [("t1", '{"x":1}'), ("t2", '{"y":2}')][: 2 if variant in ("no_index", "all_zero") else 1]
        assert streamed.results(f"MR-26 {variant}") == [{"x": 1}, {"y": 2}][: len(found)]


def test_mr_27_a_tool_that_does_not_exist(run: CaseRun) -> None:
    unknown, fine = run.results("MR-27")
    assert "Available tools: terminal" in unknown["error"] and fine["output"] == "hi\n"
    assert run.rows["MR-27"]["outcome"] == "completed"
    assert "browser_magic_click" not in run.rows["MR-27"]["tool_stats"]
    assert "browser_magic_click" not in run.statistics["tool_statistics"]


def test_mr_28_a_call_that_arrives_as_text_does_not_pass_as_completed(run: CaseRun) -> None:
    row = run.rows["MR-28"]
    assert (row["outcome"], row["completed"], row["partial"]) == ("invalid_tool_calls", False, True)
    assert run.calls("MR-28") == [] and run.counts("MR-28", "terminal") == (0, 0, 0)
    (message,) = run.said("MR-28")
    assert message.tool_calls == () and "<tool_call>" in message.content
    assert {t["reply"]["suspect"] for t in run.records["MR-28"]["turns"]} == {"call_like_text"}


def test_mr_29_http_200_with_an_error_object(run: CaseRun) -> None:
    assert run.rows["MR-29"]["outcome"] == "completed" and run.rows["MR-29"]["api_calls"] == 1
    first, second = run.attempts("MR-29")
    assert (first["status"], second["status"]) == (502, 429)
    assert second["waited"] >= 1.0  # as its Retry-After asked
    failure = run.failures["MR-29 permanent"]
    assert failure["outcome"] == "model_error"
    assert (failure["error"]["type"], failure["error"]["status"]) == ("permanent", 400)
    assert len(run.answers.requests["MR-29 permanent"]) == 1


def test_mr_30_the_routers_error_text_is_retried(run: CaseRun) -> None:
    assert [m.content for m in run.said("MR-30")] == ["done"]
    assert "router" in run.attempts("MR-30")[0]["error"]


def test_mr_32_html_body_instead_of_json(run: CaseRun) -> None:
    assert [m.content for m in run.said("MR-32")] == ["done"]
    assert [a["kind"] for a in run.attempts("MR-32")] == ["transient", "malformed"]


@pytest.mark.parametrize("case", ["MR-33", "MR-33 call", "MR-33 error"])
def test_mr_33_a_stream_that_ends_without_a_finish_reason_is_no_answer(streamed: CaseRun, case: str) -> None:
    assert [m.content for m in streamed.said(case)] == ["whole"]
    assert streamed.calls(case) == []
    (attempt,) = streamed.attempts(case)
    assert ("upstream died" if case == "MR-33 error" else "without a finish reason") in attempt["error"]


def test_mr_34_a_finish_reason_that_is_no_success(run: CaseRun) -> None:
    row = run.rows["MR-34"]
    assert (row["outcome"], row["completed"], row["api_calls"]) == ("empty_answer", False, 0)
    record = run.records["MR-34"]
    assert {t["reply"]["finish"] for t in record["turns"]} == {"MALFORMED_FUNCTION_CALL"}
    assert "MALFORMED_FUNCTION_CALL" in record["reason"]


def test_mr_38_some_turns_have_reasoning_and_some_do_not(run: CaseRun) -> None:
    row = run.rows["MR-38"]
    assert row["reasoning_stats"] == {
        "total_assistant_turns": 2,
        "turns_with_reasoning": 1,
        "turns_without_reasoning": 1,
    }
    assert FILTERS["no_reasoning"].judge(row, FilterContext(known_tools=frozenset())) == ""


def test_the_statistics_are_the_sums_of_the_rows(run: CaseRun) -> None:
    rows, statistics = list(run.rows.values()), run.statistics
    assert statistics["outcomes"] == Counter([r["outcome"] for r in rows] + ["model_error"])
    assert statistics["reconcile"]["failed"] == 1 and statistics["reconcile"]["kept"] == len(rows)
    for name in ("total_assistant_turns", "turns_with_reasoning", "turns_without_reasoning"):
        assert statistics["reasoning_statistics"][name] == sum(r["reasoning_stats"][name] for r in rows)
    for tool, figures in statistics["tool_statistics"].items():
        for name in ("count", "success", "failure"):
            assert figures[name] == sum(r["tool_stats"][tool][name] for r in rows)
    assert statistics["tool_statistics"]["terminal"]["count"] > 20


def test_only_the_failure_is_owed_on_resume(run: CaseRun) -> None:
    before = {prompt: len(requests) for prompt, requests in run.answers.requests.items()}
    run.place.run(run.url, *FLAGS, "--resume")
    after = {prompt: len(requests) for prompt, requests in run.answers.requests.items()}
    assert {p: n - before[p] for p, n in after.items() if n != before[p]} == {"MR-29 permanent": 1}
    again = CaseRun(run.place, run.answers, run.url)
    assert again.rows["MR-29 permanent"]["outcome"] == "completed"
    assert again.records["MR-29 permanent"]["attempt"] == 2
    assert again.statistics["reconcile"]["failed"] == 0
