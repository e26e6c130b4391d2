"""The toolsets `web` (web_search, web_extract) and `search` (web_search).

Searching is a provider's (`providers/`), chosen by `WEB_PROVIDER` or by which key is there. Pages are fetched from here
and read by trafilatura and pypdf in child processes, unless the provider holds them (`corpus`) or renders them
(`firecrawl`). Everything that costs to start is shared by the sessions of a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from gristmill.tools.addresses import guarded_session
from gristmill.tools.base import Tool, ToolContext, Toolset
from gristmill.tools.extract import Job, Page, Unreadable, cut, missing_packages
from gristmill.tools.extract_pool import ExtractPool
from gristmill.tools.fetch import FetchError, fetch
from gristmill.tools.json_api import ApiError
from gristmill.tools.providers.base import Provider, ProviderError, Services
from gristmill.tools.providers.brave import Brave
from gristmill.tools.providers.corpus import Corpus
from gristmill.tools.providers.ddgs import Ddgs
from gristmill.tools.providers.exa import Exa
from gristmill.tools.providers.firecrawl import Firecrawl
from gristmill.tools.providers.parallel import Parallel
from gristmill.tools.providers.searxng import SearXNG
from gristmill.tools.providers.tavily import Tavily
from gristmill.types import ToolSchema

PAGE_LIMIT = 10_000_000  # bytes of one page
PAGE_SECONDS = 30.0  # of fetching one, redirects included
MOST_URLS = 5
CHAR_LIMIT = 15_000
_ACCEPT = "text/html,application/xhtml+xml,application/pdf,text/*;q=0.9,application/json;q=0.9,*/*;q=0.5"

# In the order of choice where `WEB_PROVIDER` names none.
PROVIDERS: Mapping[str, type[Provider]] = {
    kind.name: kind for kind in (Corpus, Tavily, Exa, Parallel, Firecrawl, Brave, SearXNG, Ddgs)
}


@dataclass(frozen=True)
class _Web:
    """What the sessions of a worker share."""

    pages: aiohttp.ClientSession
    reader: ExtractPool
    provider: Provider


def choose_provider(settings: Mapping[str, str]) -> type[Provider]:
    """The provider that `WEB_PROVIDER` names, else the first whose key or folder is set, else the keyless one.

    Raises:
        ProviderError: an unknown name.
    """
    name = settings.get("WEB_PROVIDER", "").strip().lower()
    if name:
        if name not in PROVIDERS:
            raise ProviderError(f"Unknown WEB_PROVIDER: {name}. Known are {', '.join(sorted(PROVIDERS))}.")
        return PROVIDERS[name]
    # A folder or key that is set but wrong is an error to be told, not a reason to take another provider.
    return next((kind for kind in PROVIDERS.values() if settings.get(kind.key) or not kind.missing(settings)), Ddgs)


def missing_for_search(settings: Mapping[str, str]) -> str:
    """What web_search lacks here, as a sentence; empty where it can work."""
    try:
        return choose_provider(settings).missing(settings)
    except ProviderError as error:
        return str(error)


def missing_for_web(settings: Mapping[str, str]) -> str:
    """What web_search or web_extract lack here, as a sentence; empty where both can work."""
    return missing_packages() or missing_for_search(settings)


async def web_search(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Hits of the provider, or why there are none to be had."""
    try:
        found = await _web(context).provider.search(arguments["query"].strip(), arguments.get("limit", 5))
    except (ProviderError, ApiError) as error:
        return {"success": False, "error": str(error)}
    hits = [
        {"title": hit.title, "url": hit.url, "description": hit.description, "position": position}
        for position, hit in enumerate(found, 1)
    ]
    return {"success": True, "data": {"web": hits}}


async def web_extract(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """The pages at once, each with its own error; the call as a whole fails only where every page did."""
    limit = arguments.get("char_limit", CHAR_LIMIT)
    urls: list[str] = [url.strip() for url in arguments["urls"]]
    try:
        web = _web(context)
    except ProviderError as error:
        return {"results": [], "error": str(error)}
    results = await asyncio.gather(*(_result(web, url, limit, context.allow_private_urls) for url in urls))
    if all(result["error"] for result in results):
        return {
            "results": results,
            "error": results[0]["error"] if len(urls) == 1 else "None of the pages can be read.",
        }
    return {"results": results}


async def _result(web: _Web, url: str, limit: int, allow_private: bool) -> dict[str, Any]:
    try:
        page = await web.provider.extract(url) or await _page(web, url, allow_private)
    except (ProviderError, ApiError, FetchError, Unreadable) as error:
        return {"url": url, "title": "", "content": "", "error": str(error)}
    return {"url": url, "title": page.title, "content": cut(page.content, limit), "error": None}


async def _page(web: _Web, url: str, allow_private: bool) -> Page:
    found = await fetch(
        web.pages, url, limit=PAGE_LIMIT, seconds=PAGE_SECONDS, allow_private=allow_private, accept=_ACCEPT
    )
    job = Job(body=found.body, content_type=found.content_type, charset=found.charset, url=found.url)
    return await web.reader.read(job)


def _web(context: ToolContext) -> _Web:
    """What this worker's sessions share, started by the first of them. Raises `ProviderError`."""
    web = context.shared.get("web")
    if isinstance(web, _Web):
        return web
    kind = choose_provider(context.settings)
    api = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
    pages = guarded_session(context.allow_private_urls)
    reader = ExtractPool()
    provider = kind(context.settings, Services(api, reader, context.allow_private_urls))
    context.shared["web"] = web = _Web(pages, reader, provider)
    context.shared_closers += [reader.close, pages.close, api.close, provider.close]  # run last first
    return web


_SEARCH = Tool(
    schema=ToolSchema(
        name="web_search",
        description=(
            "Search the web. Gives titles, URLs and short descriptions, best first; read a page with web_extract "
            'or the browser. Usual operators such as "exact words" and site:example.org work with most engines.'
        ),
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1, "maxLength": 2000, "description": "What to look for."},
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 100,
                    "default": 5,
                    "description": "Most results to give.",
                },
            },
            "required": ["query"],
        },
    ),
    toolset="web",
    run=web_search,
)
_EXTRACT = Tool(
    schema=ToolSchema(
        name="web_extract",
        description=(
            "Read web pages as Markdown: HTML, PDF, plain text and JSON, up to 5 at once. Each result has the page's "
            "title and content, or an error. Pages that need JavaScript want the browser."
        ),
        parameters={
            "type": "object",
            "properties": {
                "urls": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MOST_URLS,
                    "description": "The pages' URLs.",
                },
                "char_limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 100_000,
                    "default": CHAR_LIMIT,
                    "description": "Most characters of each page.",
                },
            },
            "required": ["urls"],
        },
    ),
    toolset="web",
    run=web_extract,
)

WEB = Toolset("web", (_SEARCH, _EXTRACT), missing_for_web)
SEARCH = Toolset("search", (_SEARCH,), missing_for_search)
