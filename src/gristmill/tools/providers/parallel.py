"""Parallel, by `PARALLEL_API_KEY`.

Source: docs.parallel.ai, Search API v1: POST /v1/search with the header x-api-key; `search_queries` of up to 200
characters each, `objective`, `mode`, `advanced_settings.max_results` up to 40; results[] of title, url, excerpts[].
"""

from __future__ import annotations

from typing import Any

from gristmill.tools.json_api import ask_json
from gristmill.tools.providers.base import Hit, Provider, hit, rows

QUERY_LIMIT = 200  # characters


class Parallel(Provider):
    """The description is the first words of the page's excerpts."""

    name = "parallel"
    most = 40
    key = "PARALLEL_API_KEY"
    home = "https://api.parallel.ai"

    async def search(self, query: str, limit: int) -> list[Hit]:
        """One request."""
        data: Any = await ask_json(
            self.services.http,
            "POST",
            f"{self.url}/v1/search",
            headers={"x-api-key": self.settings[self.key]},
            body={
                "search_queries": [query[:QUERY_LIMIT]],
                "objective": query,
                "mode": "basic",
                "advanced_settings": {"max_results": min(limit, self.most)},
            },
        )
        found = rows(data, "results")[:limit]
        return [
            hit(row.get("title"), row["url"], " ".join(map(str, row.get("excerpts") or ())))
            for row in found
            if row.get("url")
        ]
