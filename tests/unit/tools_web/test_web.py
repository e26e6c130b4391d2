"""web_search and web_extract as a session calls them: the corpus, pages on loopback, limits, errors in results."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import jsonschema_rs
import pytest
from aiohttp import web

from gristmill.tools.base import ToolContext, succeeded
from gristmill.tools.providers.base import ProviderError
from gristmill.tools.providers.corpus import index_ahead
from gristmill.tools.web import PROVIDERS, SEARCH, WEB, choose_provider, web_extract, web_search

from .test_extract import pdf

CORPUS = Path(__file__).parents[2] / "data" / "corpus"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The documents, in a folder that may be changed."""
    return shutil.copytree(CORPUS, tmp_path / "corpus")


def test_toolsets_and_schemas() -> None:
    assert [tool.name for tool in WEB.tools] == ["web_search", "web_extract"]
    assert [tool.name for tool in SEARCH.tools] == ["web_search"]
    for tool in WEB.tools:
        jsonschema_rs.meta.validate(tool.schema.parameters)
        assert tool.toolset == "web" and tool.access({}).path == ()
    fits = jsonschema_rs.validator_for(WEB.tools[0].schema.parameters).is_valid
    assert fits({"query": "x", "limit": 100}) and not fits({"query": "x", "limit": 101}) and not fits({})
    fits = jsonschema_rs.validator_for(WEB.tools[1].schema.parameters).is_valid
    assert fits({"urls": ["x"] * 5}) and not fits({"urls": ["x"] * 6}) and not fits({"urls": []})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "ddgs"),
        ({"TAVILY_API_KEY": "k"}, "tavily"),
        ({"EXA_API_KEY": "k"}, "exa"),
        ({"PARALLEL_API_KEY": "k"}, "parallel"),
        ({"FIRECRAWL_API_URL": "http://localhost:3002"}, "firecrawl"),
        ({"BRAVE_API_KEY": "k"}, "brave"),
        ({"SEARXNG_URL": "http://localhost:8080"}, "searxng"),
        ({"SEARXNG_URL": "x", "TAVILY_API_KEY": "k"}, "tavily"),
        ({"GRISTMILL_CORPUS": "/no/such/folder", "TAVILY_API_KEY": "k"}, "corpus"),
        ({"WEB_PROVIDER": "DDGS", "TAVILY_API_KEY": "k"}, "ddgs"),
        ({"WEB_PROVIDER": "brave"}, "brave"),
    ],
)
def test_the_provider_is_named_or_follows_from_what_is_there(settings: dict[str, str], name: str) -> None:
    assert choose_provider(settings) is PROVIDERS[name]


def test_what_is_missing_is_said() -> None:
    assert WEB.missing({}) == "" and SEARCH.missing({}) == ""
    assert SEARCH.missing({"WEB_PROVIDER": "brave"}) == "The search provider brave needs BRAVE_API_KEY."
    assert "FIRECRAWL_API_KEY or FIRECRAWL_API_URL" in WEB.missing({"WEB_PROVIDER": "firecrawl"})
    assert "not a folder" in WEB.missing({"GRISTMILL_CORPUS": "/no/such/folder"})
    assert WEB.missing({"WEB_PROVIDER": "gopher"}).startswith("Unknown WEB_PROVIDER: gopher. Known are brave, corpus")
    assert WEB.missing({"GRISTMILL_CORPUS": str(CORPUS)}) == ""


async def test_search_and_extract_from_the_corpus(context, corpus: Path) -> None:
    session: ToolContext = context(GRISTMILL_CORPUS=str(corpus))
    found = await web_search(session, {"query": "comparing a message digest safely", "limit": 2})
    assert found["success"] is True
    first, second = found["data"]["web"]
    assert first["url"] == "corpus://library/hmac.html" and first["position"] == 1 and second["position"] == 2
    assert first["title"].startswith("hmac — Keyed-Hashing") and "digest" in first["description"]
    assert set(first) == {"title", "url", "description", "position"}

    urls = [first["url"], "library/copy.html#top", "sources/colorsys.rst"]
    read = await web_extract(session, {"urls": urls})
    assert [result["url"] for result in read["results"]] == urls and set(read) == {"results"}
    hmac, copy, colors = read["results"]
    assert set(hmac) == {"url", "title", "content", "error"} and hmac["error"] is None
    assert "(corpus://library/hashlib.html#hashlib.new)" in hmac["content"] and "corpus.invalid" not in hmac["content"]
    assert copy["title"].startswith("copy — Shallow") and "YIQ" in colors["content"]
    assert colors["title"] == "sources/colorsys.rst"


async def test_the_corpus_gives_the_same_hits_in_every_worker_and_run(context, corpus: Path, tmp_path: Path) -> None:
    async def hits(cache: str) -> list[str]:
        session = context(GRISTMILL_CORPUS=str(corpus), XDG_CACHE_HOME=str(tmp_path / cache))
        found = await web_search(session, {"query": "module objects copy hash", "limit": 10})
        return [hit["url"] for hit in found["data"]["web"]]

    once = await hits("one")
    assert len(once) == 4 and once == await hits("one") == await hits("two")


async def test_only_documents_of_the_corpus_are_read(context, corpus: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (corpus / "link.txt").symlink_to(secret)
    (corpus / "inside.txt").symlink_to(corpus / "sources" / "colorsys.rst")
    (corpus / ".hidden.txt").write_text("hidden")
    (corpus / "program.exe").write_text("unknown type")
    (corpus / "empty.txt").touch()
    session = context(GRISTMILL_CORPUS=str(corpus))
    urls = [
        "corpus://../secret.txt",
        "corpus://library/../../secret.txt",
        "corpus://%2e%2e/secret.txt",
        str(secret),
        f"file://{secret}",
    ]
    for url in [*urls, "link.txt", ".hidden.txt", "program.exe", "empty.txt", "http://example.org/"]:
        read = await web_extract(session, {"urls": [url]})
        assert read["results"][0]["content"] == "" and read["results"][0]["error"], url
        assert succeeded(read, is_json=True)[0] is False
    read = await web_extract(session, {"urls": ["inside.txt"]})
    assert "YIQ" in read["results"][0]["content"]


async def test_queries_of_any_kind_are_searched_for_not_executed(context, corpus: Path) -> None:
    session = context(GRISTMILL_CORPUS=str(corpus))
    for query in ('"', "'", "a OR", "NEAR(", "title:hmac*", "* ^", "-", "hmac AND NOT (", "日本語", "x" * 2000):
        assert (await web_search(session, {"query": query}))["success"] is True
    assert (await web_search(session, {"query": "?!"}))["data"]["web"] == []


async def test_a_changed_corpus_is_indexed_anew_and_its_old_index_removed(
    context, corpus: Path, tmp_path: Path
) -> None:
    async def urls(query: str) -> list[str]:
        found = await web_search(context(GRISTMILL_CORPUS=str(corpus)), {"query": query})
        return [hit["url"] for hit in found["data"]["web"]]

    assert await urls("windmill") == []
    (corpus / "mühle 1.md").write_text("# The windmill\n\nIt turns.")
    (corpus / "mills.pdf").write_bytes(pdf("A windmill in a PDF"))
    (corpus / "broken.pdf").write_bytes(b"%PDF-1.4 windmill")
    assert sorted(await urls("windmills")) == ["corpus://m%C3%BChle%201.md", "corpus://mills.pdf"]
    assert len(list((tmp_path / "cache" / "gristmill" / "corpus").glob("*.sqlite"))) == 1
    assert not list((tmp_path / "cache").rglob("*.partial"))
    read = await web_extract(
        context(GRISTMILL_CORPUS=str(corpus)), {"urls": ["corpus://m%C3%BChle%201.md", "broken.pdf"]}
    )
    assert read["results"][0]["content"] == "# The windmill\n\nIt turns."
    assert "damaged" in read["results"][1]["error"]


async def test_many_workers_at_once_build_one_index(context, corpus: Path, tmp_path: Path) -> None:
    """Eight searches at once through four separate providers, over a partial file that a killed builder left."""
    settings = {"GRISTMILL_CORPUS": str(corpus), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    await index_ahead(settings)
    (index,) = (tmp_path / "cache" / "gristmill" / "corpus").glob("*.sqlite")
    index.unlink()
    index.with_suffix(".partial").write_bytes(b"half an index")

    builders = [context(**settings) for _ in range(4)]
    found = await asyncio.gather(*(web_search(one, {"query": "hmac"}) for one in builders for _ in range(2)))
    assert all(answer["data"]["web"][0]["url"] == "corpus://library/hmac.html" for answer in found)
    with sqlite3.connect(index) as db:
        assert db.execute("SELECT count(*) FROM documents").fetchone() == (4,)
    assert not index.with_suffix(".partial").exists()


async def test_a_session_that_is_cancelled_does_not_stop_the_building(context, corpus: Path) -> None:
    for n in range(200):
        shutil.copy(corpus / "library" / "copy.html", corpus / f"copy-{n}.html")
    session = context(GRISTMILL_CORPUS=str(corpus))
    first = asyncio.create_task(web_search(session, {"query": "hmac"}))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    found = await web_search(session, {"query": "hmac"})
    assert found["data"]["web"][0]["url"] == "corpus://library/hmac.html"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file in the way is enough for root only")
async def test_a_cache_that_cannot_be_written_is_said(context, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = await web_search(
        context(GRISTMILL_CORPUS=str(corpus), XDG_CACHE_HOME=str(tmp_path / "file")), {"query": "hmac"}
    )
    assert found["success"] is False and "cannot be indexed" in found["error"]


def answer(body: bytes | str, content_type: str = "text/html", **headers: str):
    async def handler(request: web.Request) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(body=data, headers={"Content-Type": content_type, **headers})

    return handler


async def test_pages_of_every_kind_come_with_their_own_errors(serve, context) -> None:
    server = await serve(
        {
            "/page": answer("<title>Mill</title><p>It <b>turns</b> and <a href='on'>goes on</a>.</p>"),
            "/latin": answer("<p>grüße</p>".encode("latin-1"), "text/html; charset=iso-8859-1"),
            "/pdf": answer(pdf("Paper words"), "application/pdf"),
            "/json": answer('{"a": [1, 2]}', "application/json"),
            "/picture": answer(b"\x89PNG\r\n\x1a\n\0", "image/png"),
        }
    )
    session = context(private=True, WEB_PROVIDER="ddgs")
    urls = [str(server.make_url(path)) for path in ("/page", "/latin", "/pdf", "/json")]
    read = await web_extract(session, {"urls": [*urls, str(server.make_url("/picture"))]})
    page, latin, paper, data, picture = read["results"]
    assert set(read) == {"results"}
    assert (page["title"], page["error"]) == ("Mill", None)
    assert page["content"] == f"It **turns** and [goes on]({server.make_url('/on')})."
    assert "grüße" in latin["content"] and paper["content"] == "Paper words" and data["content"] == '{"a": [1, 2]}'
    assert picture["content"] == "" and "vision_analyze" in picture["error"]
    assert succeeded(read, is_json=True) == (True, "")

    read = await web_extract(session, {"urls": [str(server.make_url("/lost")), str(server.make_url("/picture"))]})
    assert [bool(result["error"]) for result in read["results"]] == [True, True]
    assert succeeded(read, is_json=True) == (False, "None of the pages can be read.")


async def test_char_limit_cuts_at_characters(serve, context) -> None:
    text = "Grüße 👩‍🔬 " * 5_000
    server = await serve({"/": answer(text, "text/plain; charset=utf-8")})
    session = context(private=True, WEB_PROVIDER="ddgs")
    for limit in (1, 7, 8, 9, 10, 500, 15_000):
        read = await web_extract(session, {"urls": [str(server.make_url("/"))], "char_limit": limit})
        content = read["results"][0]["content"]
        assert len(content) <= limit and not content.endswith("\u200d")
    assert len((await web_extract(session, {"urls": [str(server.make_url("/"))]}))["results"][0]["content"]) <= 15_000


async def test_private_addresses_are_refused_in_the_result(serve, context) -> None:
    server = await serve({"/": answer("secret")})
    urls = [f"http://{host}:{server.port}/" for host in ("127.0.0.1", "localhost", "2130706433", "[::1]")]
    read = await web_extract(context(WEB_PROVIDER="ddgs"), {"urls": [*urls, "file:///etc/passwd"]})
    assert all(result["content"] == "" and result["error"] for result in read["results"])
    assert "only public addresses" in read["results"][0]["error"]


async def test_what_a_worker_shares_is_made_once_and_closed_by_it(context, corpus: Path) -> None:
    first, second = context(GRISTMILL_CORPUS=str(corpus)), context(GRISTMILL_CORPUS=str(corpus))
    second.shared, second.shared_closers = first.shared, first.shared_closers
    await asyncio.gather(web_search(first, {"query": "hmac"}), web_search(second, {"query": "copy"}))
    assert len(first.shared_closers) == 4
    web_parts = first.shared["web"]
    for closer in reversed(first.shared_closers):
        await closer()
    assert web_parts.pages.closed and not web_parts.reader._idle
    first.shared_closers.clear()


async def test_an_unknown_provider_is_an_error_of_the_call(context) -> None:
    session = context(WEB_PROVIDER="gopher")
    assert "Unknown WEB_PROVIDER" in (await web_search(session, {"query": "x"}))["error"]
    assert "Unknown WEB_PROVIDER" in (await web_extract(session, {"urls": ["http://example.org/"]}))["error"]


async def test_a_folder_that_is_gone_or_empty_is_said(tmp_path: Path, context) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("gone", "empty"):
        settings = {"GRISTMILL_CORPUS": str(tmp_path / name), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        found = await web_search(context(**settings), {"query": "x"})
        assert "there are no documents" in found["error"]
        with pytest.raises(ProviderError, match=r"there are no documents|is not a folder"):
            await index_ahead(settings)
    with pytest.raises(ProviderError, match="needs GRISTMILL_CORPUS"):
        await index_ahead({})
    assert not (tmp_path / "cache").exists()
