"""Reading documents: kinds, charsets, PDF, cuts; and the child processes that do it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tools.extract import Job, Unreadable, cut, decode, extract, kind_of
from gristmill.tools.extract_pool import ExtractPool

CORPUS = Path(__file__).parents[2] / "data" / "corpus"
HMAC = (CORPUS / "library" / "hmac.html").read_bytes()


def pdf(*pages: str) -> bytes:
    """A real PDF of pages with one line of text each, written by hand (PDF 1.4, section 7.5)."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * n} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    info = len(objects) + 1
    objects.append("<< /Title (On mills) >>")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        out
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info {info} 0 R >>\nstartxref\n{len(out)}\n%%EOF"
        ).encode()
    )


def test_html_becomes_markdown_with_working_links_and_without_furniture() -> None:
    page = extract(Job(body=HMAC, content_type="text/html", url="https://docs.python.org/3/library/hmac.html"))
    assert page.title == "hmac — Keyed-Hashing for Message Authentication — Python 3.11.2 documentation"
    assert page.content.startswith("# [`hmac`]")
    assert "(https://docs.python.org/3/library/hashlib.html#hashlib.new)" in page.content
    assert "¶" not in page.content and "Table of Contents" not in page.content


def test_short_pages_and_tables_are_read_too() -> None:
    page = extract(Job(body=b"<title> A \n b </title><p>Hello short</p>", content_type="text/html"))
    assert (page.title, page.content) == ("A b", "Hello short")
    table = b"<table><tr><th>mill</th><th>stones</th></tr><tr><td>north</td><td>42</td></tr></table>"
    page = extract(Job(body=b"<html><body><p>Counts.</p>" + table + b"</body></html>", content_type="text/html"))
    assert "| north | 42 |" in page.content


def test_plain_gives_all_words_of_a_page_but_its_navigation() -> None:
    page = extract(Job(body=HMAC, content_type="text/html", plain=True))
    assert page.content.startswith("hmac — Keyed-Hashing")
    assert "Report a Bug" not in page.content and "compare_digest" in page.content


def test_pdf_text_and_title() -> None:
    page = extract(Job(body=pdf("The first page", "The second page"), content_type="application/pdf"))
    assert page.title == "On mills"
    assert page.content == "The first page\n\nThe second page"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(body=b"%PDF-1.4 nothing behind it", content_type="application/pdf"), "The PDF is damaged"),
        (Job(body=pdf(""), content_type="application/pdf"), "no text"),
        (Job(body=b"\x89PNG\r\n\x1a\n\x00\x00", content_type="image/png"), "vision_analyze"),
        (Job(body=b"PK\x03\x04\x00\x00", content_type="application/zip"), "application/zip, not text"),
        (Job(body=b"\x00\x01\x02", content_type="application/octet-stream"), "not text"),
        (Job(body=b"\x00\x01\x02"), "binary data, not text"),
        (Job(body=b"", content_type="text/html"), "no readable text"),
        (Job(body=b" \n ", content_type="text/plain"), "no readable text"),
        (Job(body=b"<html><script>x()</script></html>", content_type="text/html"), "no readable text"),
    ],
)
def test_unreadable(job: Job, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        extract(job)


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        ("text/html", b"", "html"),
        ("application/xhtml+xml", b"", "html"),
        ("text/plain", b"  <!DOCTYPE html><p>", "html"),
        ("", b"<html lang=en>", "html"),
        ("application/octet-stream", b"%PDF-1.7", "pdf"),
        ("text/html", b"%PDF-1.7", "pdf"),
        ("application/json", b"{}", "text"),
        ("application/ld+json", b"{}", "text"),
        ("application/atom+xml", b"<feed>", "text"),
        ("text/x-python", b"pass", "text"),
        ("application/octet-stream", b"words", "text"),
        ("application/octet-stream", b"w\x00rds", "application/octet-stream"),
        ("video/mp4", b"words", "video/mp4"),
    ],
)
def test_kinds(content_type: str, body: bytes, kind: str) -> None:
    assert kind_of(content_type, body) == kind


@pytest.mark.parametrize(
    ("body", "charset"),
    [
        ("grüße, 世界".encode(), ""),
        ("grüße, 世界".encode(), "utf-8"),
        ("grüße, 世界".encode(), "ascii"),  # wrongly declared
        ("grüße, 世界".encode(), "no-such-charset"),
        ("grüße, 世界".encode("utf-8-sig"), "latin-1"),
        ("\ufeffgrüße, 世界".encode("utf-16-le"), ""),
        ("\ufeffgrüße, 世界".encode("utf-16-be"), ""),
        ("grüße, 世界".encode("gb18030"), "GB18030"),
        ('<meta charset="gb18030">grüße, 世界'.encode("gb18030"), ""),
        ('<META http-equiv=content-type content="text/html; charset=gb18030">grüße, 世界'.encode("gb18030"), ""),
    ],
)
def test_charsets(body: bytes, charset: str) -> None:
    assert decode(body, charset).endswith("grüße, 世界")


def test_latin_1_is_windows_1252_as_in_browsers() -> None:
    assert decode("“grüße” – 5 €".encode("cp1252"), "iso-8859-1") == "“grüße” – 5 €"


@given(st.binary(max_size=200), st.sampled_from(("", "utf-8", "latin-1", "utf-16", "shift_jis", "idna", "rot13", "x")))
def test_any_bytes_are_some_text(body: bytes, charset: str) -> None:
    decode(body, charset).encode("utf-8", "surrogatepass").decode()


@given(st.text(alphabet="ae\u0301👩\u200d🔬🏽️€ ", max_size=400), st.integers(1, 400))
def test_cuts_stay_in_the_limit_and_between_characters(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text


def test_a_cut_says_how_much_there_is() -> None:
    short = cut("word " * 10_000, 1_000)
    assert len(short) <= 1_000 and short.startswith("word word")
    assert short.endswith("[Cut: 50,000 characters in all; ask with a larger char_limit for more.]")


@pytest.fixture
async def pool():
    made = ExtractPool(children=1)
    yield made
    await made.close()


async def test_a_child_reads_one_document_after_the_other(pool: ExtractPool) -> None:
    first, second = await asyncio.gather(
        pool.read(Job(body=HMAC, content_type="text/html")), pool.read(Job(body=b"two", content_type="text/plain"))
    )
    assert "compare_digest" in first.content and second.content == "two"
    with pytest.raises(Unreadable, match="not text"):
        await pool.read(Job(body=b"\x00", content_type="image/gif"))
    (child,) = pool._idle
    assert child.returncode is None
    await pool.close()
    assert child.returncode is not None


async def test_a_document_that_takes_too_long_ends_the_child_and_the_next_one_gets_another() -> None:
    pool = ExtractPool(children=1, seconds=1.0)
    try:
        await pool.read(Job(body=b"one"))
        (child,) = pool._idle
        slow = b"<html><body>" + b"<p><a href='x'>link</a> some words that are read</p>" * 60_000
        with pytest.raises(Unreadable, match="within 1 seconds"):
            await pool.read(Job(body=slow, content_type="text/html"))
        assert child.returncode == -signal.SIGALRM
        assert (await pool.read(Job(body=b"two"))).content == "two"
    finally:
        await pool.close()


async def test_a_document_that_wants_too_much_memory_costs_a_child_only() -> None:
    pool = ExtractPool(children=1, memory=100 << 20)
    try:
        with pytest.raises(Unreadable, match="100 MiB"):
            await pool.read(Job(body=b"words " * 20_000_000, content_type="text/plain"))
        assert (await pool.read(Job(body=b"next"))).content == "next"
    finally:
        await pool.close()


async def test_cancelling_a_reader_ends_its_child(pool: ExtractPool) -> None:
    await pool.read(Job(body=b"one"))
    (child,) = pool._idle
    os.kill(child.pid, signal.SIGSTOP)
    task = asyncio.create_task(pool.read(Job(body=b"two")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert child.returncode == -signal.SIGKILL
    assert (await pool.read(Job(body=b"three"))).content == "three"


async def test_a_child_sees_nothing_of_the_environment_and_ends_with_its_input(
    pool: ExtractPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "canary")
    await pool.read(Job(body=b"one"))
    (child,) = pool._idle
    assert b"canary" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    assert child.stdin is not None
    child.stdin.close()  # what the system does when the worker is killed
    assert await asyncio.wait_for(child.wait(), 5) == 0
