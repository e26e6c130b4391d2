"""Brave Search, by `BRAVE_API_KEY`.

Source: api-dashboard.search.brave.com, Web Search API: GET /res/v1/web/search with the header X-Subscription-Token; `q`
up to 400 characters, `count` up to 20, `offset` in pages up to 9; web.results[] of title, url, description.
"""

from __future__ import annotations

from typing import Any

from gristmill.tools.json_api import ask_json
from gristmill.tools.providers.base import Hit, Provider, hit, rows

PAGE = 20
QUERY_LIMIT = 400  # characters


class Brave(Provider):
    """One request for each 20 hits."""

    name = "brave"
    key = "BRAVE_API_KEY"
    home = "https://api.search.brave.com"

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Read result pages until there are enough hits or no more of them."""
        found: list[Hit] = []
        for offset in range(-(-limit // PAGE)):
            data: Any = await ask_json(
                self.services.http,
                "GET",
                f"{self.url}/res/v1/web/search",
                headers={"X-Subscription-Token": self.settings[self.key]},
                params={
                    "q": query[:QUERY_LIMIT],
                    "count": str(min(limit, PAGE)),
                    "offset": str(offset),
                    "text_decorations": "false",
                },
            )
            page = rows(data, "web", "results", optional=True)
            found += [hit(row.get("title"), row["url"], row.get("description")) for row in page if row.get("url")]
            if len(page) < PAGE:
                break
        return found[:limit]
