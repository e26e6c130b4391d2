"""Which dialect is spoken, and the check before a run."""

from typing import Any

import pytest

from gristmill.config import ModelConfig
from gristmill.errors import SetupError
from gristmill.model.select import dialect_name, probe, warnings_for
from gristmill.testing.endpoint import ScriptedEndpoint, say


def config(url: str = "http://127.0.0.1:1/v1", **settings: Any) -> ModelConfig:
    return ModelConfig(**{"name": "m", "base_url": url, **settings})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "chat"),
        ({"name": "local"}, "json"),
        ({"name": "local/smollm2-135m"}, "json"),
        ({"dialect": "json"}, "json"),
        ({"base_url": "https://openrouter.ai/api/v1"}, "chat"),
    ],
)
def test_the_dialect_follows_host_and_model(settings: dict[str, Any], name: str) -> None:
    assert dialect_name(config(**settings)) == name


async def test_a_good_endpoint_passes() -> None:
    async with ScriptedEndpoint([say("x")], models=("m",), api_key="k") as endpoint:
        assert await probe(config(endpoint.url, api_key="k")) == []
        assert endpoint.count == 0


async def test_an_endpoint_without_a_list_passes() -> None:
    async with ScriptedEndpoint([say("x")], models=None) as endpoint:
        assert await probe(config(endpoint.url)) == []


async def test_an_unlisted_model_is_a_warning() -> None:
    async with ScriptedEndpoint([say("x")], models=("a", "b")) as endpoint:
        (warning,) = await probe(config(endpoint.url))
    assert "m; it lists a, b." in warning


async def test_a_variant_of_a_listed_model_is_none() -> None:
    async with ScriptedEndpoint([say("x")], models=("m",)) as endpoint:
        assert await probe(config(endpoint.url, name="m:free")) == []


async def test_a_wrong_key_is_an_error_without_the_key() -> None:
    async with ScriptedEndpoint([say("x")], api_key="right") as endpoint:
        with pytest.raises(SetupError, match="401") as caught:
            await probe(config(endpoint.url, api_key="wrong-key"))
    assert "wrong-key" not in str(caught.value)


async def test_a_key_with_a_newline_at_its_end_works() -> None:
    async with ScriptedEndpoint([say("x")], api_key="right") as endpoint:
        for dialect in ("chat", "anthropic"):
            assert await probe(config(endpoint.url, api_key="right\n", dialect=dialect)) == []


async def test_an_endpoint_that_is_down_is_an_error() -> None:
    async with ScriptedEndpoint([say("x")]) as endpoint:
        url = endpoint.url
    with pytest.raises(SetupError, match="cannot connect"):
        await probe(config(url))


def test_routing_off_openrouter_is_warned_about() -> None:
    (warning,) = warnings_for(config(providers_allowed=("a",), provider_sort="price"))
    assert warning.startswith("--providers_allowed, --provider_sort have no effect")
    assert warnings_for(config("https://openrouter.ai/api/v1", providers_allowed=("a",))) == []
