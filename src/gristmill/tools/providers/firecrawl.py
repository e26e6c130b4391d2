"""Firecrawl, by `FIRECRAWL_API_KEY`, or self-hosted by `FIRECRAWL_API_URL`.

Source: docs.firecrawl.dev, API v2: POST /v2/search with query and limit (up to 100): data.web[] of title, url,
description. POST /v2/scrape with url and formats: data.markdown and data.metadata of title, url, statusCode, error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gristmill.tools.addresses import check_url, resolve_and_check
from gristmill.tools.extract import Page
from gristmill.tools.json_api import ask_json, error_text
from gristmill.tools.providers.base import Hit, Provider, ProviderError, Services, hit, rows

SCRAPE_SECONDS = 60.0


class Firecrawl(Provider):
    """Searches, and renders the pages that are read, JavaScript included.

    The page is fetched from where Firecrawl runs. Private addresses are refused before it is asked and judged by the
    final URL afterwards; redirects in between follow its own network rules.
    """

    name = "firecrawl"
    home = "https://api.firecrawl.dev"

    def __init__(self, settings: Mapping[str, str], services: Services, url: str = "") -> None:
        super().__init__(settings, services, url or settings.get("FIRECRAWL_API_URL", ""))

    @classmethod
    def missing(cls, settings: Mapping[str, str]) -> str:
        """Whether there is a key or an instance of one's own."""
        if settings.get("FIRECRAWL_API_KEY") or settings.get("FIRECRAWL_API_URL"):
            return ""
        return "The search provider firecrawl needs FIRECRAWL_API_KEY or FIRECRAWL_API_URL."

    async def search(self, query: str, limit: int) -> list[Hit]:
        """One request."""
        data = await self._ask("/v2/search", {"query": query, "limit": min(limit, self.most)})
        found = rows(data, "web", optional=True)[:limit]
        return [hit(row.get("title"), row["url"], row.get("description")) for row in found if row.get("url")]

    async def extract(self, url: str) -> Page:
        """The page as Markdown."""
        await self._refuse_private(url)
        data = await self._ask("/v2/scrape", {"url": url, "formats": ["markdown"]}, SCRAPE_SECONDS)
        about = data.get("metadata") or {}
        if about.get("url"):
            await self._refuse_private(str(about["url"]))
        if (about.get("statusCode") or 200) >= 400:
            raise ProviderError(f"HTTP {about['statusCode']} {about.get('error') or ''}".rstrip() + ".")
        title = about.get("title") or ""
        return Page(str(title[0] if isinstance(title, list) else title), str(data.get("markdown") or ""))

    async def _ask(self, path: str, body: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
        key = self.settings.get("FIRECRAWL_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        http = self.services.http
        answer: Any = await ask_json(http, "POST", self.url + path, headers=headers, body=body, seconds=seconds)
        if not isinstance(answer, dict) or not answer.get("success") or not isinstance(answer.get("data"), dict):
            raise ProviderError(f"Firecrawl failed: {error_text(answer)[:300] or 'there is no data in its answer'}.")
        data: dict[str, Any] = answer["data"]
        return data

    async def _refuse_private(self, url: str) -> None:
        private = self.services.allow_private
        refusal = check_url(url, allow_private=private) or await resolve_and_check(
            urlsplit(url).hostname or "", allow_private=private
        )
        if refusal:
            raise ProviderError(refusal)
