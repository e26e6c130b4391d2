"""Which key goes where: the variable of the endpoint's host, and nothing for a host that has none."""

from __future__ import annotations

import pytest

from gristmill.config import DEFAULT_BASE_URL, find_api_key, tool_settings
from gristmill.errors import SetupError

OURS = {"OPENROUTER_API_KEY": "of-openrouter", "OPENAI_API_KEY": "of-openai"}


def test_a_remote_endpoint_needs_the_key_of_its_own_host() -> None:
    for environ in ({}, {"OPENAI_API_KEY": "of-another-host"}, {"OPENROUTER_API_KEY": " "}):
        with pytest.raises(SetupError, match="OPENROUTER_API_KEY"):
            find_api_key(DEFAULT_BASE_URL, "", environ)
    assert find_api_key(DEFAULT_BASE_URL, "", OURS) == "of-openrouter"
    assert find_api_key("https://eu.openrouter.ai/api", None, OURS) == "of-openrouter"
    assert find_api_key(DEFAULT_BASE_URL, "given", OURS) == "given"
    for host in ("openrouter.ai.example.org", "notopenrouter.ai", "10.0.0.1"):
        with pytest.raises(SetupError, match="sent only to the host it belongs to"):
            find_api_key(f"https://{host}/v1", "", OURS)
    for url in ("http://127.0.0.1:1/v1", "http://localhost/v1", "http://[::1]:8000/v1"):
        assert find_api_key(url, "", OURS) == ""


def test_a_service_of_tools_gets_the_key_of_its_host_where_it_has_no_own() -> None:
    urls = {"VISION_BASE_URL": "https://api.openai.com/v1", "IMAGE_BASE_URL": "https://images.example.org/v1"}
    found = tool_settings({**OURS, **urls})
    assert found == {**urls, "VISION_API_KEY": "of-openai"}
    assert tool_settings({**OURS, **urls, "VISION_API_KEY": "own"})["VISION_API_KEY"] == "own"
    assert tool_settings({**OURS, "IMAGE_BASE_URL": "http://[bad"}) == {"IMAGE_BASE_URL": "http://[bad"}
    assert tool_settings(OURS) == {}
