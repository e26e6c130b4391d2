"""A folder of documents as the web: search and pages come from it, so that data can be made again without a network.

`GRISTMILL_CORPUS` names the folder. Its documents (HTML, text, Markdown, reStructuredText, JSON, CSV, PDF) are indexed
once with SQLite's FTS5 and ranked by BM25, ties by path: the same folder gives the same hits, in whatever order its
files lie. A document's URL is `corpus://` and its path; the path alone is understood too, and links between documents
become such URLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from gristmill.tools.extract import Job, Page, Unreadable, missing_packages
from gristmill.tools.extract_pool import ExtractPool
from gristmill.tools.providers.base import Hit, Provider, ProviderError, hit
from gristmill.tools.providers.corpus_index import TYPES, CorpusIndex, open_index

SCHEME = "corpus://"
_STAND_IN = "http://corpus.invalid/"  # links are resolved against it, since `corpus` is no scheme that libraries know


class Corpus(Provider):
    """One folder, one index, shared by the sessions of a worker."""

    name = "corpus"
    key = "GRISTMILL_CORPUS"
    _opening: asyncio.Task[CorpusIndex] | None = None

    @classmethod
    def missing(cls, settings: Mapping[str, str]) -> str:
        """Whether the folder is there, its documents can be read and SQLite can search."""
        if sentence := super().missing(settings) or missing_packages():
            return sentence
        if not Path(settings[cls.key]).is_dir():
            return f"{cls.key} names {settings[cls.key]}, which is not a folder."
        with sqlite3.connect(":memory:") as db:
            if not db.execute("SELECT sqlite_compileoption_used('ENABLE_FTS5')").fetchone()[0]:
                return "The corpus needs an SQLite with FTS5, which this Python lacks."
        return ""

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Documents that hold any of the query's words, those that hold more and rarer ones first."""
        words = dict.fromkeys(re.findall(r"\w+", query.lower()))
        if not words:
            return []
        index = await self._open()
        found = await asyncio.to_thread(index.search, " OR ".join(f'"{word}"' for word in words), limit)
        return [hit(title or path, SCHEME + quote(path), snippet) for path, title, snippet in found]

    async def extract(self, url: str) -> Page:
        """A document of the corpus; there is no other page."""
        parts = urlsplit(url)
        if parts.scheme not in ("", "corpus"):
            raise ProviderError(f"Only documents of the corpus can be read here ({SCHEME}…), as web_search gives them.")
        path = unquote(parts.netloc + parts.path).lstrip("/")
        index = await self._open()
        # Looked up, never joined: what is not in the index is no document, wherever the path points.
        if path not in index.paths:
            raise ProviderError(
                "There is no such document in the corpus; web_search gives the URLs of those there are."
            )
        file = index.directory / path
        try:
            body = await asyncio.to_thread(file.read_bytes)
            job = Job(body=body, content_type=TYPES[file.suffix.lower()], url=_STAND_IN + quote(path))
            page = await self.services.pages.read(job)
        except (OSError, Unreadable) as error:
            raise ProviderError(f"It cannot be read: {error}") from None
        return Page(page.title or path, page.content.replace(_STAND_IN, SCHEME))

    async def close(self) -> None:
        """Close the index."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, ProviderError):
                (await opening).close()

    async def _open(self) -> CorpusIndex:
        # A task of its own, since building outlives a session that is cancelled while it waits.
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(_open_index(self.settings, self.services.pages))
        return await asyncio.shield(self._opening)


async def index_ahead(settings: Mapping[str, str]) -> None:
    """Build the index of `GRISTMILL_CORPUS` now, so that the first session need not. Raises `ProviderError`."""
    if sentence := Corpus.missing(settings):
        raise ProviderError(sentence)
    pages = ExtractPool()
    try:
        (await _open_index(settings, pages)).close()
    finally:
        await pages.close()


async def _open_index(settings: Mapping[str, str], pages: ExtractPool) -> CorpusIndex:
    cache = settings.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    try:
        return await open_index(Path(settings[Corpus.key]).resolve(), Path(cache) / "gristmill" / "corpus", pages)
    except (OSError, sqlite3.Error) as error:
        raise ProviderError(f"The corpus cannot be indexed: {error}.") from None
