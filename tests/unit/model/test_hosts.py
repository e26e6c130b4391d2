"""What each host is told, and the warnings about what it does not understand."""

from typing import Any

import pytest

from gristmill.config import EFFORTS, ModelConfig
from gristmill.model import jsontext
from gristmill.model.base import Request
from gristmill.model.chat import ChatDialect
from gristmill.model.hosts import HOSTS, host_of, nearest, reasoning_back, request_fields, warnings_for
from gristmill.types import Message, ToolCall

OPENROUTER = "https://openrouter.ai/api/v1"
VLLM = "http://gpu-node:8000/v1"


def config(url: str, **settings: Any) -> ModelConfig:
    return ModelConfig(**{"name": "m", "base_url": url, **settings})


@pytest.mark.parametrize(
    ("url", "settings", "fields"),
    [
        (OPENROUTER, {}, {"reasoning": {"enabled": True}}),
        (OPENROUTER, {"reasoning_effort": "high"}, {"reasoning": {"enabled": True, "effort": "high"}}),
        (OPENROUTER, {"reasoning_effort": "max"}, {"reasoning": {"enabled": True, "effort": "xhigh"}}),
        (OPENROUTER, {"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}),
        (
            OPENROUTER,
            {"reasoning_disabled": True, "reasoning_effort": "high"},
            {"reasoning": {"enabled": False}},
        ),
        (
            OPENROUTER,
            {"name": "anthropic/claude-opus-4.7", "reasoning_effort": "max"},
            {"reasoning": {"enabled": True, "effort": "xhigh"}, "verbosity": "max"},
        ),
        (
            OPENROUTER,
            {
                "providers_allowed": ("a", "b"),
                "providers_ignored": ("c",),
                "providers_order": ("b",),
                "provider_sort": "price",
            },
            {
                "reasoning": {"enabled": True},
                "provider": {"only": ["a", "b"], "ignore": ["c"], "order": ["b"], "sort": "price"},
            },
        ),
        ("https://api.openai.com/v1", {}, {}),
        ("https://api.openai.com/v1", {"reasoning_effort": "ultra"}, {"reasoning_effort": "xhigh"}),
        ("https://api.openai.com/v1", {"reasoning_disabled": True}, {"reasoning_effort": "none"}),
        ("https://me.openai.azure.com/openai/v1", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            "https://api.deepseek.com",
            {"reasoning_effort": "max"},
            {"thinking": {"type": "enabled"}, "reasoning_effort": "max"},
        ),
        ("https://api.deepseek.com", {"reasoning_disabled": True}, {"thinking": {"type": "disabled"}}),
        (
            "https://api.z.ai/api/paas/v4",
            {"reasoning_effort": "high"},
            {"thinking": {"type": "enabled", "clear_thinking": False}, "reasoning_effort": "high"},
        ),
        ("https://api.mistral.ai/v1", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ("https://api.together.xyz/v1", {"reasoning_disabled": True}, {"reasoning": {"enabled": False}}),
        (VLLM, {}, {}),
        (
            VLLM,
            {"reasoning_disabled": True},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (
            VLLM,
            {"reasoning_effort": "low"},
            {
                "chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
                "reasoning_effort": "low",
            },
        ),
        (VLLM, {"record_tokens": True}, {"logprobs": True, "return_token_ids": True}),
        ("https://api.openai.com/v1", {"record_tokens": True}, {}),
    ],
)
def test_flags_in_the_words_of_the_host(url: str, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    assert request_fields(config(url, **settings)) == fields


def test_every_effort_has_a_nearest_one_everywhere() -> None:
    for host in HOSTS:
        for effort in EFFORTS:
            assert nearest(effort, host.efforts) in host.efforts
            assert (nearest(effort, host.efforts) == "none") == (effort == "none")


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        (VLLM, {"provider_sort": "price"}, "--provider_sort has no effect with gpu-node"),
        (OPENROUTER, {"reasoning_effort": "ultra"}, "no reasoning effort ultra: xhigh is sent"),
        ("https://api.openai.com/v1", {"record_tokens": True}, "--record_tokens has no effect with OpenAI"),
    ],
)
def test_a_flag_without_effect_is_one_sentence(url: str, settings: dict[str, Any], words: str) -> None:
    (warning,) = warnings_for(config(url, **settings))
    assert words in warning


def test_flags_with_effect_draw_no_warning() -> None:
    assert warnings_for(config(OPENROUTER, provider_sort="price", reasoning_effort="high")) == []
    assert warnings_for(config(VLLM, record_tokens=True, reasoning_disabled=True)) == []


DETAILS = [{"type": "reasoning.encrypted", "data": "x"}]


@pytest.mark.parametrize(
    ("url", "extra", "reasoning", "back"),
    [
        (OPENROUTER, {"reasoning": "R", "reasoning_details": DETAILS}, "R", {"reasoning_details": DETAILS}),
        (OPENROUTER, {"reasoning": "R"}, "R", {"reasoning": "R"}),
        ("https://api.deepseek.com", {"reasoning_content": "R"}, "R", {"reasoning_content": "R"}),
        ("https://api.openai.com/v1", {"reasoning_content": "R"}, "R", {}),
        ("https://api.groq.com/openai/v1", {"reasoning": "R"}, "R", {"reasoning": "R"}),
        ("https://api.mistral.ai/v1", {"content": [{"type": "thinking"}]}, "R", {"content": [{"type": "thinking"}]}),
        (VLLM, {"reasoning": "R"}, "R", {"reasoning": "R", "reasoning_content": "R"}),
        (VLLM, {"content": "<think>R</think>a"}, "R", {"content": "<think>R</think>a"}),
        (VLLM, {}, "", {}),
    ],
)
def test_reasoning_goes_back_in_the_fields_of_the_host(
    url: str, extra: dict[str, Any], reasoning: str, back: dict[str, Any]
) -> None:
    message = Message(role="assistant", reasoning=reasoning, extra=extra)
    assert reasoning_back(host_of(config(url)), message) == back


def body(name: str) -> list[dict[str, Any]]:
    called = Message(role="assistant", tool_calls=(ToolCall(id="1", name="t"),))
    messages = [
        Message(role="system", content="S"),
        Message(role="user", content="U"),
        called,
        Message(role="tool", tool_call_id="1", content="R"),
    ]
    made = jsontext.decode(ChatDialect(config(OPENROUTER, name=name)).encode(Request(messages=messages)))
    found: list[dict[str, Any]] = made["messages"]
    return found


def test_cache_marks_are_set_where_the_provider_needs_them() -> None:
    marked = [isinstance(m["content"], list) and "cache_control" in m["content"][-1] for m in body("anthropic/claude")]
    assert marked == [True, True, False, True]
    assert "cache_control" not in str(body("openai/gpt-5"))


def test_openai_gets_its_own_name_of_the_output_limit() -> None:
    request = Request(messages=[Message(role="user", content="x")], max_tokens=9)
    made = jsontext.decode(ChatDialect(config("https://api.openai.com/v1")).encode(request))
    assert (made["max_completion_tokens"], "max_tokens" in made) == (9, False)
