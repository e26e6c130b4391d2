"""Keyless search through the `ddgs` package, which asks public engines (DuckDuckGo, Brave, Mojeek, Wikipedia, …)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from gristmill.tools.providers.base import Hit, Provider, ProviderError, hit

ENGINE_SECONDS = 10  # of one engine
SECONDS = 60.0  # of a search over all engines


class Ddgs(Provider):
    """The default. Public engines limit how much one address may ask: for large runs take a provider with a key."""

    name = "ddgs"

    @classmethod
    def missing(cls, settings: Mapping[str, str]) -> str:
        """Whether the package is there."""
        if importlib.util.find_spec("ddgs"):
            return ""
        return "Keyless search needs the package ddgs: pip install 'gristmill[web]'."

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Ask engines until there are enough hits.

        No hits at all are an error: engines that refuse to answer cannot be told from engines that find nothing.
        """
        # A thread of its own, since it may wait long: the loop's few are needed for resolving names.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ddgs")
        try:
            work = asyncio.get_running_loop().run_in_executor(thread, _search, query, limit)
            return await asyncio.wait_for(work, SECONDS)
        except TimeoutError:
            raise ProviderError(f"The search engines did not answer within {SECONDS:g} seconds.") from None
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def _search(query: str, limit: int) -> list[Hit]:
    from ddgs import DDGS
    from ddgs.exceptions import DDGSException

    try:
        found = DDGS(timeout=ENGINE_SECONDS).text(query, max_results=limit)
    except DDGSException as error:
        if str(error) == "No results found.":
            raise ProviderError("No results: the search engines found nothing, or refused to answer.") from None
        raise ProviderError(f"The search engines failed: {' '.join(str(error).split())[:300]}.") from None
    return [hit(row.get("title"), row["href"], row.get("body")) for row in found if row.get("href")][:limit]
