"""Exa, by `EXA_API_KEY`.

Source: exa.ai/docs/reference/search: POST /search with the header x-api-key; `numResults` up to 100, `contents.text`
with `maxCharacters`; results[] of title, url, text.
"""

from __future__ import annotations

from typing import Any

from gristmill.tools.json_api import ask_json
from gristmill.tools.providers.base import DESCRIPTION_LIMIT, Hit, Provider, hit, rows


class Exa(Provider):
    """Neural search; the description is the beginning of the page's text."""

    name = "exa"
    key = "EXA_API_KEY"
    home = "https://api.exa.ai"

    async def search(self, query: str, limit: int) -> list[Hit]:
        """One request."""
        data: Any = await ask_json(
            self.services.http,
            "POST",
            f"{self.url}/search",
            headers={"x-api-key": self.settings[self.key]},
            body={
                "query": query,
                "numResults": min(limit, self.most),
                "type": "auto",
                "contents": {"text": {"maxCharacters": DESCRIPTION_LIMIT}},
            },
        )
        found = rows(data, "results")[:limit]
        return [hit(row.get("title"), row["url"], row.get("text")) for row in found if row.get("url")]
