"""Tavily, by `TAVILY_API_KEY`.

Source: docs.tavily.com/documentation/api-reference/endpoint/search: POST /search with a bearer token; `max_results` up
to 20; results[] of title, url, content.
"""

from __future__ import annotations

from typing import Any

from gristmill.tools.json_api import ask_json
from gristmill.tools.providers.base import Hit, Provider, hit, rows


class Tavily(Provider):
    """One credit a search (depth `basic`)."""

    name = "tavily"
    most = 20
    key = "TAVILY_API_KEY"
    home = "https://api.tavily.com"

    async def search(self, query: str, limit: int) -> list[Hit]:
        """One request."""
        data: Any = await ask_json(
            self.services.http,
            "POST",
            f"{self.url}/search",
            headers={"Authorization": f"Bearer {self.settings[self.key]}"},
            body={"query": query, "max_results": min(limit, self.most), "search_depth": "basic"},
        )
        found = rows(data, "results")[:limit]
        return [hit(row.get("title"), row["url"], row.get("content")) for row in found if row.get("url")]
