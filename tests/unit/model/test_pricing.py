"""What a call costs: reported, listed, or unknown."""

import subprocess
import sys
from typing import Any

import pytest

from gristmill.config import ModelConfig
from gristmill.model.base import Request
from gristmill.model.pricing import Prices
from gristmill.testing.endpoint import ScriptedEndpoint, say
from gristmill.types import Message, Usage

genai_prices = pytest.importorskip("genai_prices")

TOKENS = Usage(prompt_tokens=1_000_000, completion_tokens=100_000, cost_known=False)


def prices(url: str, name: str) -> Prices:
    return Prices(ModelConfig(name=name, base_url=url))


async def test_a_reported_cost_wins() -> None:
    reported = Usage(prompt_tokens=1, cost_usd=0.5)
    assert await prices("https://api.openai.com/v1", "gpt-5").priced(reported) is reported


async def test_a_listed_price_is_used_else() -> None:
    usage = await prices("https://api.openai.com/v1", "gpt-5").priced(TOKENS)
    assert usage.cost_known
    assert usage.cost_usd == pytest.approx(1.25 + 1.00)


async def test_cached_tokens_are_cheaper_and_cache_writes_dearer() -> None:
    listed = prices("https://api.anthropic.com/v1", "claude-sonnet-4-5")
    plain = (await listed.priced(TOKENS)).cost_usd
    read = await listed.priced(
        Usage(prompt_tokens=1_000_000, completion_tokens=100_000, cached_tokens=900_000, cost_known=False)
    )
    written = await listed.priced(TOKENS, raw={"cache_creation_input_tokens": 900_000})
    assert read.cost_usd < plain < written.cost_usd


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8000/v1", "my-model"),
        ("http://localhost:8000/v1", "gpt-5"),  # a server of one's own has no list price, whatever its model is called
        ("https://api.openai.com/v1", "no-such-model"),
    ],
)
async def test_an_unlisted_model_costs_an_unknown_sum(url: str, name: str) -> None:
    listed = prices(url, name)
    for _ in range(2):
        usage = await listed.priced(TOKENS)
        assert (usage.cost_usd, usage.cost_known) == (0.0, False)
    assert listed.estimate(1000, 10) is None


async def test_the_embedded_model_costs_nothing() -> None:
    usage = await prices("http://127.0.0.1:1/v1", "local").priced(TOKENS)
    assert (usage.cost_usd, usage.cost_known) == (0.0, True)
    assert prices("http://127.0.0.1:1/v1", "local").estimate(10, 10) == 0.0


def test_the_price_list_is_not_imported_for_loopback() -> None:
    code = (
        "import asyncio, sys\n"
        "from gristmill.config import ModelConfig\n"
        "from gristmill.model.pricing import Prices\n"
        "from gristmill.types import Usage\n"
        "usage = Usage(prompt_tokens=1, cost_known=False)\n"
        "for url in ('http://127.0.0.1:1/v1', 'https://api.openai.com/v1'):\n"
        "    asyncio.run(Prices(ModelConfig(name='gpt-5', base_url=url)).priced(usage))\n"
        "    print('genai_prices' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]


def test_an_estimate_before_a_run() -> None:
    assert prices("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4.5").estimate(1_000_000, 0)


async def test_the_reply_carries_the_reported_cost(model_at: Any) -> None:
    async with ScriptedEndpoint([say("x", cost=0.25)]) as endpoint:
        reply = await model_at(endpoint.url).complete(Request(messages=[Message(role="user", content="x")]))
    assert (reply.usage.cost_usd, reply.usage.cost_known) == (0.25, True)
