"""A SearXNG instance of one's own, by `SEARXNG_URL`.

Source: docs.searxng.org, Search API: GET /search with q, format=json, pageno; results[] of title, url, content. The
instance must allow the format `json` in its settings, else it answers 403.
"""

from __future__ import annotations

from typing import Any

from gristmill.tools.json_api import ApiError, ask_json
from gristmill.tools.providers.base import Hit, Provider, hit, rows

MOST_PAGES = 10


class SearXNG(Provider):
    """Metasearch without a key; the instance may be on loopback, since the user named it."""

    name = "searxng"
    key = "SEARXNG_URL"

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Read result pages until there are enough hits or a page brings no new one."""
        base = self.url or self.settings[self.key].rstrip("/")
        found: dict[str, Hit] = {}
        for page in range(1, MOST_PAGES + 1):
            params = {"q": query, "format": "json", "pageno": str(page)}
            try:
                data: Any = await ask_json(self.services.http, "GET", f"{base}/search", params=params)
            except ApiError as error:
                if error.status == 403:
                    raise ApiError(f"{error} Does its settings.yml allow the format json?", status=403) from None
                raise
            before = len(found)
            for row in rows(data, "results"):
                if row.get("url"):
                    found.setdefault(row["url"], hit(row.get("title"), row["url"], row.get("content")))
            if len(found) >= limit or len(found) == before:
                break
        return list(found.values())[:limit]
