"""Requests to providers' APIs: what is retried, what is not, and that no key is told."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from gristmill.tools.json_api import ApiError, ask_json, error_text

KEY = "sk-canary-1234567890"


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as client:
        yield client


def answers(*given: web.Response | tuple[int, str, dict[str, str]]):
    """A handler that gives these answers one after the other, and the list of requests it got."""
    left, seen = list(given), []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.method, dict(request.headers), await request.text()))
        status, text, headers = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=text, headers=headers)

    return handler, seen


async def test_transient_answers_are_tried_again_and_the_body_is_json(serve, session) -> None:
    handler, seen = answers(
        (429, '{"error": "slow down"}', {"Retry-After": "0.01"}),
        (503, "<html>busy</html>", {"Retry-After": "0.01"}),
        (200, '{"ok": true}', {}),
    )
    server = await serve({"/x": handler})
    answer = await ask_json(session, "POST", str(server.make_url("/x")), body={"q": "ä"}, headers={"x-api-key": KEY})
    assert answer == {"ok": True}
    assert len(seen) == 3
    assert seen[0][1]["Content-Type"] == "application/json" and seen[0][2] == '{"q":"ä"}'


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (400, '{"error": {"message": "bad query"}}', "bad query"),
        (401, '{"detail": {"error": "no"}}', "HTTP 401: no"),
        (402, '{"message": "pay"}', "pay"),
        (422, '{"detail": [{"msg": "field required"}]}', "field required"),
        (404, "<html><body>lost</body></html>", "HTTP 404."),
        (302, "", "HTTP 302"),
    ],
)
async def test_permanent_answers_are_not(serve, session, status: int, text: str, says: str) -> None:
    handler, seen = answers((status, text, {"Location": "/elsewhere"}))
    elsewhere, redirected = answers((200, "{}", {}))
    server = await serve({"/x": handler, "/elsewhere": elsewhere})
    with pytest.raises(ApiError) as caught:
        await ask_json(session, "GET", str(server.make_url("/x")), headers={"x-api-key": KEY})
    assert says in str(caught.value) and caught.value.status == status and not caught.value.transient
    assert len(seen) == 1 and redirected == []


async def test_it_gives_up_after_its_tries_or_where_it_would_wait_too_long(serve, session) -> None:
    often, seen = answers((500, "{}", {"Retry-After": "0.01"}))
    later, seen_later = answers((429, "{}", {"Retry-After": "3600"}))
    server = await serve({"/often": often, "/later": later})
    with pytest.raises(ApiError, match="HTTP 500"):
        await ask_json(session, "GET", str(server.make_url("/often")))
    with pytest.raises(ApiError, match="HTTP 429"):
        await ask_json(session, "GET", str(server.make_url("/later")))
    assert (len(seen), len(seen_later)) == (3, 1)


async def test_what_is_not_json_too_large_too_slow_or_not_there(serve, session) -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    words, _ = answers((200, "hello", {}))
    large, _ = answers((200, '"' + "x" * 5_000 + '"', {}))
    server = await serve({"/words": words, "/large": large, "/slow": slow})

    async def failure(path: str, **options: object) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await ask_json(session, "GET", str(server.make_url(path)), tries=1, **options)
        return caught.value

    assert "not JSON" in str(await failure("/words"))
    assert "larger than 1,000 bytes" in str(await failure("/large", limit=1_000))
    assert "within 0.1 seconds" in str(await failure("/slow", seconds=0.1))
    with pytest.raises(ApiError, match="cannot be reached") as caught:
        await ask_json(session, "GET", "http://127.0.0.1:1/", tries=1)
    assert caught.value.transient
    for url in ("http://[::1", "localhost:8080/search", "ftp://x/"):
        with pytest.raises(ApiError, match="not a usable http address"):
            await ask_json(session, "GET", url)


async def test_a_key_that_the_provider_repeats_is_not_told(serve, session) -> None:
    handler, _ = answers((401, f'{{"error": "the key {KEY} is wrong"}}', {}))
    server = await serve({"/x": handler})
    for headers in ({"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        with pytest.raises(ApiError) as caught:
            await ask_json(session, "GET", str(server.make_url("/x")), headers=headers)
        assert KEY not in str(caught.value) and "[key]" in str(caught.value)


def test_error_text_finds_the_usual_places() -> None:
    assert error_text({"error": None, "message": "m"}) == "m"
    assert error_text({"error": {"code": 3, "message": "deep"}}) == "deep"
    assert error_text([{"msg": "a"}, "b"]) == "a; b"
    assert error_text({"ok": 1}) == "" and error_text(None) == ""
