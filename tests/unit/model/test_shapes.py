"""Whatever JSON an endpoint answers, it becomes a reply or a `ModelError`, whole and streamed, in every dialect."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.config import ModelConfig
from gristmill.errors import ModelError
from gristmill.model.base import Reply, Request
from gristmill.model.client import understand
from gristmill.model.select import make_dialect
from gristmill.testing.endpoint import ScriptedEndpoint, Turn
from gristmill.types import Message, ToolSchema

HELLO = Request(
    messages=[Message(role="user", content="hello")],
    tools=(ToolSchema(name="t", description="T.", parameters={"type": "object"}),),
)
CHAT = {
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": [{"text": "b"}]}],
                "reasoning_details": [{"type": "reasoning.text", "text": "r"}],
                "tool_calls": [{"id": "1", "function": {"name": "t", "arguments": "{}"}}],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
        "cost": 0.1,
    },
}
ANTHROPIC = {
    "content": [
        {"type": "thinking", "thinking": "r", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "1", "name": "t", "input": {}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": 1},
}
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just([]), st.just({}), st.just(["x"]))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("dialect", ["chat", "hermes", "json", "anthropic"])
@given(data=st.data())
def test_one_odd_value_anywhere_is_understood_or_refused(dialect: str, data: st.DataObject) -> None:
    good = ANTHROPIC if dialect == "anthropic" else CHAT
    answer = replaced(good, data.draw(st.sampled_from(places(good))), data.draw(ODD))
    made = make_dialect(ModelConfig(name="m", base_url="http://127.0.0.1/v1", dialect=dialect))
    try:
        reply = understand(made, answer, HELLO)
    except ModelError:
        return
    assert isinstance(reply, Reply)
    assert isinstance(reply.message.content, str)
    assert all(isinstance(c.arguments, str) and isinstance(c.name, str) for c in reply.message.tool_calls)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": "x"},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"tool_calls": ["x"]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": "x"}]}}]},
        {"choices": ["x"]},
    ],
)
async def test_odd_events_are_malformed(model_at: Any, event: Any) -> None:
    async with ScriptedEndpoint([Turn(events=(event, "[DONE]"))]) as endpoint:
        with pytest.raises(ModelError) as caught:
            await model_at(endpoint.url, stream=True, max_retries=0).complete(HELLO)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("wanted", [False, True], ids=["dropped", "recorded"])
async def test_token_ids_and_logprobs_are_kept_on_demand(model_at: Any, stream: bool, wanted: bool) -> None:
    halves = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}]
    if stream:
        turn = Turn(
            events=(
                {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"content": ""}}]},
                *(
                    {
                        "choices": [
                            {
                                "index": 0,
                                "delta": {"content": half["token"]},
                                "logprobs": {"content": [half]},
                                "token_ids": [number],
                            }
                        ]
                    }
                    for number, half in enumerate(halves, 3)
                ),
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            )
        )
    else:
        choice = {
            "index": 0,
            "message": {"content": "ab"},
            "finish_reason": "stop",
            "token_ids": [3, 4],
            "logprobs": {"content": halves},
        }
        turn = Turn(body={"prompt_token_ids": [1, 2], "choices": [choice]})
    async with ScriptedEndpoint([turn]) as endpoint:
        reply = await model_at(endpoint.url, stream=stream, record_tokens=wanted).complete(HELLO)
        assert endpoint.requests[0].body.get("return_token_ids", False) is wanted
    assert reply.message.content == "ab"
    if wanted:
        assert reply.raw["prompt_token_ids"] == [1, 2]
        assert reply.raw["choice"]["token_ids"] == [3, 4]
        assert reply.raw["choice"]["logprobs"] == {"content": halves}
    else:
        assert "prompt_token_ids" not in reply.raw
        assert set(reply.raw["choice"]) == {"finish_reason"}
