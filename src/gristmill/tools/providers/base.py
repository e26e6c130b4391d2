"""The search port: one query in, hits out. Adapters: one small module each in this folder.

Contract, which `tests/contract/test_search_providers.py` checks for every adapter:
- `search` gives at most `limit` hits, best first; fewer where the provider has no more or gives no more than `most`.
- `extract` is for providers that hold the pages themselves; None says "fetch it from the web".
- Failures are `ProviderError` or `json_api.ApiError`, with a sentence that a model can read, never a key.
- One object serves all sessions of a worker at the same time.
"""

from __future__ import annotations

import html
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp

from gristmill.tools.extract import Page
from gristmill.tools.extract_pool import ExtractPool
from gristmill.tools.json_api import error_text
from gristmill.tools.text import bounded

DESCRIPTION_LIMIT = 500  # characters
_TAG = re.compile(r"</?(?:strong|em|b|i|mark|span|br)(?:\s[^>]*)?/?>", re.IGNORECASE)  # marks of the words found


class ProviderError(Exception):
    """The provider cannot answer; the text says why."""


@dataclass(frozen=True)
class Hit:
    """One search result."""

    title: str
    url: str
    description: str


@dataclass(frozen=True)
class Services:
    """What a worker lends its providers: an HTTP client for their APIs, and readers of documents."""

    http: aiohttp.ClientSession
    pages: ExtractPool
    allow_private: bool = False


class Provider(ABC):
    """A place to search.

    Args:
        settings: keys and URLs, see `config.TOOL_VARIABLES`.
        services: lent by the worker, closed by it.
        url: another base URL than the provider's own (a proxy, a test).
    """

    name: ClassVar[str]
    most: ClassVar[int] = 100  # hits of one search
    key: ClassVar[str] = ""  # the setting it cannot work without
    home: ClassVar[str] = ""  # the base URL, and the only place where the key goes

    def __init__(self, settings: Mapping[str, str], services: Services, url: str = "") -> None:
        self.settings = settings
        self.services = services
        self.url = (url or self.home).rstrip("/")

    @classmethod
    def missing(cls, settings: Mapping[str, str]) -> str:
        """What is missing here, as a sentence; empty where it can work."""
        return f"The search provider {cls.name} needs {cls.key}." if cls.key and not settings.get(cls.key) else ""

    @abstractmethod
    async def search(self, query: str, limit: int) -> list[Hit]:
        """The best hits. Raises `ProviderError`."""

    async def extract(self, url: str) -> Page | None:
        """The page itself, where the provider holds it. Raises `ProviderError`."""
        return None

    async def close(self) -> None:  # noqa: B027 - most open nothing of their own
        """Give back what it opened itself; idempotent."""


def rows(answer: Any, *path: str, optional: bool = False) -> list[dict[str, Any]]:
    """The list of objects at `path` of an answer.

    Raises `ProviderError` where the answer is no such thing; with `optional`, an answer without it has no objects.
    """
    found = answer
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, list):
        said = error_text(answer)[:300] if isinstance(answer, dict) else ""
        if optional and isinstance(answer, dict) and path[0] not in answer and not said:
            return []
        raise ProviderError(said or f"The answer of the search provider has no list {'.'.join(path)!r}.")
    return [row for row in found if isinstance(row, dict)]


def hit(title: object, url: object, description: object) -> Hit:
    """A hit as a provider spells it, as plain text on one line."""
    return Hit(_plain(title) or str(url), str(url), _plain(description))


def _plain(text: object) -> str:
    return bounded(" ".join(html.unescape(_TAG.sub("", str(text or ""))).split()), DESCRIPTION_LIMIT)
