"""The scripted endpoint itself: who gets which turn, in this process, in a thread, in a process of its own."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import aiohttp
import pytest

from gristmill.testing.endpoint import ScriptedEndpoint, Turn, call, fail, say
from gristmill.testing.script import script_from_data, turn_from_data


def ask(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


async def answer(url: str, body: dict[str, Any]) -> str:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


async def test_the_place_in_the_conversation_picks_the_turn() -> None:
    async with ScriptedEndpoint([say("one"), say("two")]) as endpoint:
        assert await answer(endpoint.url, ask("q")) == "one"
        assert await answer(endpoint.url, ask("q")) == "one"
        assert await answer(endpoint.url, ask("q", "one", "q2")) == "two"
        assert await answer(endpoint.url, ask("q", "one", "q2", "two", "q3")) == "two"
        assert (endpoint.count, len(endpoint.requests)) == (4, 4)


async def test_prefilled_answers_do_not_count() -> None:
    async with ScriptedEndpoint([say("one"), say("two")], prefill=1) as endpoint:
        assert await answer(endpoint.url, ask("example", "example", "q")) == "one"


async def test_a_piece_of_the_prompt_picks_the_script() -> None:
    script = {"blue": [say("sky")], "": [say("else")]}
    async with ScriptedEndpoint(script) as endpoint:
        assert await answer(endpoint.url, ask("something blue")) == "sky"
        assert await answer(endpoint.url, ask("red")) == "else"


async def test_failures_come_first_once_per_conversation() -> None:
    async with (
        ScriptedEndpoint([say("fine").after(fail(500), fail(429))]) as endpoint,
        aiohttp.ClientSession() as session,
    ):
        for prompt in ("a", "b"):
            statuses = []
            for _ in range(3):
                async with session.post(f"{endpoint.url}/chat/completions", json=ask(prompt)) as response:
                    statuses.append(response.status)
            assert statuses == [500, 429, 200]


def test_a_thread_serves_a_program_without_a_loop() -> None:
    with (
        ScriptedEndpoint([say("x")], models=("m",)).in_thread() as endpoint,
        urllib.request.urlopen(f"{endpoint.url}/models") as response,
    ):
        assert json.load(response)["data"][0]["id"] == "m"


def test_a_port_in_use_is_an_error_in_a_thread() -> None:
    with ScriptedEndpoint([say("x")]).in_thread() as endpoint:
        port = int(endpoint.url.split(":")[2].split("/")[0])
        with pytest.raises(OSError, match="in use"), ScriptedEndpoint([say("x")], port=port).in_thread():
            pass


async def test_a_process_of_its_own(tmp_path: Any) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"prompts": {"blue": [{"say": "sky"}]}, "default": [{"call": "t"}, {"say": "end"}]}))
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill.testing.endpoint", "--script", str(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = (await asyncio.to_thread(process.stdout.readline)).strip()
        assert await answer(url, ask("blue")) == "sky"
        assert await answer(url, ask("q", "a", "q2")) == "end"
        async with aiohttp.ClientSession() as session, session.get(f"{url}/requests") as response:
            assert (await response.json())["count"] == 2
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        process.stdout.close()


def test_turns_from_json() -> None:
    assert turn_from_data({"say": "x", "usage": [1, 2]}) == say("x", usage=(1, 2))
    assert turn_from_data({"call": "t", "arguments": {"a": 1}}).calls == (("t", {"a": 1}),)
    assert turn_from_data({"say": "x", "before": [{"status": 500, "body": ""}]}) == say("x").after(fail(500))
    assert turn_from_data({"choices": []}).body == {"choices": []}
    assert turn_from_data({"sse": ["[DONE]"]}).events == ("[DONE]",)
    assert script_from_data([{"say": "x"}]) == [say("x")]
    with pytest.raises(ValueError, match="no field nope"):
        turn_from_data({"nope": 1})


async def test_callables_decide_for_themselves() -> None:
    def script(request: dict[str, Any], headers: Any) -> Turn | list[Turn]:
        return [call("t"), say("last")] if "tools" in request else say(headers["X-Name"])

    async with ScriptedEndpoint(script) as endpoint, aiohttp.ClientSession(headers={"X-Name": "N"}) as session:
        async with session.post(f"{endpoint.url}/chat/completions", json=ask("q")) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "N"
        async with session.post(f"{endpoint.url}/chat/completions", json={**ask("q", "a"), "tools": []}) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "last"


async def test_a_request_of_many_megabytes_is_answered() -> None:
    async with ScriptedEndpoint([say("read")]) as endpoint, aiohttp.ClientSession() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}
        async with client.post(f"{endpoint.url}/chat/completions", json=body) as answer:
            assert answer.status == 200
