"""One suite for every search provider: each speaks its documented protocol to a real server on loopback.

The servers answer as the providers' documentation says (named in each adapter); no live service is asked here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gristmill.tools.extract_pool import ExtractPool
from gristmill.tools.json_api import ApiError
from gristmill.tools.providers.base import Hit, Provider, ProviderError, Services
from gristmill.tools.providers.brave import Brave
from gristmill.tools.providers.corpus import Corpus
from gristmill.tools.providers.ddgs import Ddgs
from gristmill.tools.providers.exa import Exa
from gristmill.tools.providers.firecrawl import Firecrawl
from gristmill.tools.providers.parallel import Parallel
from gristmill.tools.providers.searxng import SearXNG
from gristmill.tools.providers.tavily import Tavily
from gristmill.tools.web import PROVIDERS

KEY = "canary-key-1234567890"
THERE_ARE = 47  # results that every server has
CORPUS = Path(__file__).parents[1] / "data" / "corpus"


def row(n: int, about: str, **more: object) -> dict[str, object]:
    return {"title": f"Result <b>{n}</b> &amp; more", "url": f"https://example.org/{n}", about: f"About\n {n}.", **more}


@dataclass
class Service:
    """What a provider's server is asked, and how it answers."""

    provider: type[Provider]
    method: str
    path: str
    key_header: str
    answer: Callable[[dict[str, Any]], Any]
    most: int
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    body: str | None = None

    async def handle(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        self.asked.append(await request.json() if self.method == "POST" else dict(request.query))
        assert (request.method, request.path) == (self.method, self.path)
        if self.body is not None or self.status != 200:
            text = self.body if self.body is not None else json.dumps({"error": f"the key {KEY} is refused"})
            return web.Response(status=self.status, text=text, headers={"Retry-After": "0.01"})
        return web.json_response(self.answer(self.asked[-1]))


def some(first: int, count: int, about: str, **more: object) -> list[dict[str, object]]:
    return [row(n, about, **more) for n in range(first, min(first + count, THERE_ARE))]


def tavily(asked: dict[str, Any]) -> Any:
    assert asked["search_depth"] == "basic" and 0 < asked["max_results"] <= 20
    return {"query": asked["query"], "results": some(0, asked["max_results"], "content", score=0.9), "response_time": 1}


def exa(asked: dict[str, Any]) -> Any:
    assert asked["contents"] == {"text": {"maxCharacters": 500}} and asked["numResults"] <= 100
    return {"requestId": "r", "results": some(0, asked["numResults"], "text", id="x", author=None)}


def parallel(asked: dict[str, Any]) -> Any:
    most = asked["advanced_settings"]["max_results"]
    assert 0 < most <= 40 and all(len(query) <= 200 for query in asked["search_queries"])
    rows = some(0, most, "excerpts", publish_date=None)
    return {"search_id": "s", "results": [{**one, "excerpts": ["About", f"{n}."]} for n, one in enumerate(rows)]}


def firecrawl(asked: dict[str, Any]) -> Any:
    return {"success": True, "data": {"web": some(0, asked["limit"], "description", position=1)}}


def brave(asked: dict[str, Any]) -> Any:
    count, offset = int(asked["count"]), int(asked["offset"])
    assert count <= 20 and offset <= 9 and len(asked["q"]) <= 400 and asked["text_decorations"] == "false"
    return {
        "type": "search",
        "query": {"original": asked["q"]},
        "web": {"results": some(count * offset, count, "description")},
    }


def searxng(asked: dict[str, Any]) -> Any:
    assert asked["format"] == "json"
    first = 10 * (int(asked["pageno"]) - 1)
    again = some(first - 1, 1, "content") if first else []  # pages of a metasearch overlap
    return {"query": asked["q"], "number_of_results": 0, "results": again + some(first, 10, "content")}


SERVICES = {
    "tavily": lambda: Service(Tavily, "POST", "/search", "Authorization", tavily, 20),
    "exa": lambda: Service(Exa, "POST", "/search", "x-api-key", exa, 100),
    "parallel": lambda: Service(Parallel, "POST", "/v1/search", "x-api-key", parallel, 40),
    "firecrawl": lambda: Service(Firecrawl, "POST", "/v2/search", "Authorization", firecrawl, 100),
    "brave": lambda: Service(Brave, "GET", "/res/v1/web/search", "X-Subscription-Token", brave, 100),
    "searxng": lambda: Service(SearXNG, "GET", "/search", "", searxng, 100),
}


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest) -> Service:
    return SERVICES[request.param]()


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    pages = ExtractPool()
    async with aiohttp.ClientSession() as http:
        yield Services(http, pages)
    await pages.close()


@pytest.fixture
async def provider(service: Service, services: Services) -> AsyncIterator[Provider]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", service.handle)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        settings = dict.fromkeys(("TAVILY_API_KEY", "EXA_API_KEY", "PARALLEL_API_KEY", "BRAVE_API_KEY"), KEY)
        yield service.provider({**settings, "FIRECRAWL_API_KEY": KEY, "SEARXNG_URL": url}, services, url)


def test_every_provider_is_tested_here() -> None:
    assert set(PROVIDERS) == {*SERVICES, "ddgs", "corpus"}


def test_a_key_has_one_home(service: Service) -> None:
    if service.key_header:
        assert service.provider.home.startswith("https://api.")
        assert service.provider({"FIRECRAWL_API_KEY": KEY}, Services(None, None)).url == service.provider.home


def test_what_is_missing_is_named(service: Service) -> None:
    sentence = service.provider.missing({})
    name = service.provider.key or "FIRECRAWL_API_KEY"
    assert name in sentence and sentence.endswith(".")
    assert service.provider.missing({name: "x"}) == ""


@pytest.mark.parametrize("limit", [1, 5, 20, 30, 100])
async def test_hits_in_order_up_to_the_limit(service: Service, provider: Provider, limit: int) -> None:
    hits = await provider.search("mills & 'stones'", limit)
    assert len(hits) == min(limit, service.most, THERE_ARE)
    assert hits == [Hit(f"Result {n} & more", f"https://example.org/{n}", f"About {n}.") for n in range(len(hits))]
    assert "mills & 'stones'" in json.dumps(service.asked[0])


async def test_the_key_goes_into_its_header_and_nowhere_else(service: Service, provider: Provider) -> None:
    await provider.search("x" * 3_000, 3)
    holding = [name for name, value in service.headers[0].items() if KEY in value]
    assert holding == ([service.key_header] if service.key_header else [])
    assert KEY not in json.dumps(service.asked)
    if service.key_header == "Authorization":
        assert service.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(("status", "requests"), [(400, 1), (401, 1), (402, 1), (403, 1), (404, 1), (429, 3), (500, 3)])
async def test_failures_are_sentences_without_the_key(
    service: Service, provider: Provider, status: int, requests: int
) -> None:
    service.status = status
    with pytest.raises((ProviderError, ApiError)) as caught:
        await provider.search("x", 3)
    assert f"HTTP {status}" in str(caught.value)
    assert KEY not in str(caught.value) or not service.key_header
    assert len(service.asked) == requests


@pytest.mark.parametrize(
    "body",
    [
        "null",
        "[]",
        "3",
        '"x"',
        "{}",
        '{"results": null, "data": null, "web": 3}',
        '{"success": false, "error": "down"}',
    ],
)
async def test_answers_of_another_form_are_failures(service: Service, provider: Provider, body: str) -> None:
    service.body = body
    if service.provider is Brave and body == "{}":  # how Brave says that it found nothing
        assert await provider.search("x", 3) == []
        return
    with pytest.raises((ProviderError, ApiError)) as caught:
        await provider.search("x", 3)
    assert "down" not in body or "down" in str(caught.value)


@pytest.mark.parametrize("body", ["<html>busy</html>", ""])
async def test_what_is_not_json_is_tried_again_and_told(
    service: Service, provider: Provider, body: str, monkeypatch
) -> None:
    monkeypatch.setattr("gristmill.tools.json_api.random.random", lambda: -0.5)  # no backoff
    service.body = body
    with pytest.raises(ApiError, match="not JSON"):
        await provider.search("x", 3)
    assert len(service.asked) == 3


async def test_results_without_a_url_and_of_another_form_are_left_out(service: Service, provider: Provider) -> None:
    rows: list[Any] = [None, 3, {"title": "no url"}, {"url": "https://example.org/x"}, {"url": "", "title": "empty"}]
    service.body = json.dumps({"success": True, "results": rows, "web": {"results": rows}, "data": {"web": rows}})
    assert await provider.search("x", 9) == [Hit("https://example.org/x", "https://example.org/x", "")]


async def test_pages_come_from_the_web_unless_the_provider_serves_them(service: Service, provider: Provider) -> None:
    if service.provider is not Firecrawl:
        assert await provider.extract("https://example.org/") is None


async def test_searxng_says_what_its_403_means(services: Services) -> None:
    service = SERVICES["searxng"]()
    service.status = 403
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", service.handle)
    async with TestServer(app) as server:
        searxng = SearXNG({"SEARXNG_URL": str(server.make_url(""))}, services)
        with pytest.raises(ApiError, match=r"settings\.yml allow the format json"):
            await searxng.search("x", 3)


# Firecrawl renders pages.

SCRAPED = {
    "markdown": "# Mill\n\nIt turns.",
    "metadata": {"title": "Mill", "url": "http://1.1.1.1/on", "statusCode": 200},
}


@pytest.fixture
async def scraper(services: Services) -> AsyncIterator[tuple[Firecrawl, dict[str, Any]]]:
    answer: dict[str, Any] = {"success": True, "data": SCRAPED}

    async def handle(request: web.Request) -> web.Response:
        assert request.path == "/v2/scrape" and await request.json() == {
            "url": "http://1.1.1.1/",
            "formats": ["markdown"],
        }
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{rest:.*}", handle)
    async with TestServer(app) as server:
        yield Firecrawl({"FIRECRAWL_API_URL": str(server.make_url("/"))}, services), answer


async def test_firecrawl_gives_the_page_as_markdown(scraper: tuple[Firecrawl, dict[str, Any]]) -> None:
    page = await scraper[0].extract("http://1.1.1.1/")
    assert (page.title, page.content) == ("Mill", "# Mill\n\nIt turns.")


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://localhost/", "http://0x7f.1/", "file:///etc/passwd"])
async def test_firecrawl_is_not_asked_for_private_places(scraper: tuple[Firecrawl, dict[str, Any]], url: str) -> None:
    with pytest.raises(ProviderError):
        await scraper[0].extract(url)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({**SCRAPED, "metadata": {"url": "http://127.0.0.1/"}}, "not a public address"),
        ({**SCRAPED, "metadata": {"statusCode": 404, "error": "Not Found"}}, r"HTTP 404 Not Found\."),
    ],
)
async def test_firecrawl_pages_that_are_none(scraper: tuple[Firecrawl, dict[str, Any]], data: Any, reason: str) -> None:
    scraper[1]["data"] = data
    with pytest.raises(ProviderError, match=reason):
        await scraper[0].extract("http://1.1.1.1/")


# ddgs: a real engine of the package, pointed at loopback.


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Any]]:
    from ddgs.engines import ENGINES
    from ddgs.engines.mojeek import Mojeek

    state: dict[str, Any] = {"status": 200, "asked": [], "results": 15}

    async def handle(request: web.Request) -> web.Response:
        state["asked"].append(dict(request.query))
        items = "".join(
            f"<li><h2><a href='https://example.org/{n}'>Mill {n}</a></h2><p class='s'>About mill {n}</p></li>"
            for n in range(state["results"])
        )
        page = f"<html><body><ul class='results-standard'>{items}</ul></body></html>"
        return web.Response(status=state["status"], text=page, content_type="text/html")

    app = web.Application()
    app.router.add_get("/search", handle)
    async with TestServer(app) as server:
        local = type("LocalMojeek", (Mojeek,), {"search_url": str(server.make_url("/search"))})
        monkeypatch.setitem(ENGINES, "text", {"mojeek": local})
        yield state


async def test_ddgs_gives_hits_of_the_package(engine: dict[str, Any], services: Services) -> None:
    hits = await Ddgs({}, services).search("mill", 7)
    assert len(hits) == 7 and engine["asked"][0]["q"] == "mill"
    assert set(hits) <= {Hit(f"Mill {n}", f"https://example.org/{n}", f"About mill {n}") for n in range(15)}


@pytest.mark.parametrize("state", [{"results": 0}, {"status": 429}])
async def test_ddgs_without_results_is_a_failure(
    engine: dict[str, Any], services: Services, state: dict[str, int]
) -> None:
    engine.update(state)
    with pytest.raises(ProviderError, match="found nothing, or refused"):
        await Ddgs({}, services).search("mill", 7)


async def test_ddgs_that_reaches_no_engine(monkeypatch: pytest.MonkeyPatch, services: Services) -> None:
    from ddgs.engines import ENGINES
    from ddgs.engines.mojeek import Mojeek

    nowhere = type("NoMojeek", (Mojeek,), {"search_url": "http://127.0.0.1:1/search"})
    monkeypatch.setitem(ENGINES, "text", {"mojeek": nowhere})
    with pytest.raises(ProviderError, match="The search engines failed"):
        await Ddgs({}, services).search("mill", 7)


async def test_the_corpus_keeps_the_contract_too(services: Services, tmp_path: Path) -> None:
    corpus = Corpus({"GRISTMILL_CORPUS": str(CORPUS), "XDG_CACHE_HOME": str(tmp_path)}, services)
    for limit in (1, 3, 100):
        hits = await corpus.search("module functions", limit)
        assert len(hits) == min(limit, 4)
        assert all(hit.url.startswith("corpus://") and hit.title and "\n" not in hit.description for hit in hits)
    assert (await corpus.extract(hits[0].url)).content
    with pytest.raises(ProviderError):
        await corpus.extract("https://example.org/")
    await corpus.close()
    await corpus.close()
