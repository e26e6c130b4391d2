"""Bytes of a page → its title and readable text. Pure, and slow where a page is large: see `extract_pool`.

Run as a module it is the pool's child: it reads `Job`s and writes `Answer`s, each a frame of a 4-byte big-endian length
and msgpack, until its input ends. A page that takes too long is ended by the child's own alarm, which kills it; the
pool sees the end of its output and starts another.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import os
import re
import resource
import signal
import sys

import msgspec

from gristmill.tools.text import bounded

LONGEST_TEXT = 1_000_000  # characters that are kept of a document
_TEXT_TYPES = ("json", "xml", "javascript", "ecmascript", "yaml", "toml", "csv", "x-sh", "sql", "x-python", "markdown")
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
_XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")
# Marks that point at the heading they stand in; they would be a link in every heading.
_HEADING_ANCHORS = "//a[normalize-space()='¶' or normalize-space()='#' or normalize-space()='§']"
_FURNITURE = "//nav|//aside|//footer|//form|//*[@role='navigation']"


class Page(msgspec.Struct, frozen=True):
    """A document's title (may be empty) and its text, HTML as Markdown."""

    title: str
    content: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A document to read. `plain` asks for all its words, quickly, for an index, instead of its article as Markdown."""

    body: bytes
    content_type: str = ""
    charset: str = ""
    url: str = ""
    plain: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What a job gave: a page, or the sentence that says why it gave none."""

    page: Page | None = None
    error: str = ""


class Unreadable(Exception):
    """The document has no text that can be read; the message says why."""


def missing_packages() -> str:
    """What is to be installed before documents can be read, as a sentence; empty where all is there."""
    absent = [name for name in ("trafilatura", "lxml_html_clean", "pypdf") if importlib.util.find_spec(name) is None]
    return f"Reading documents needs {', '.join(absent)}: pip install 'gristmill[web]'." if absent else ""


def extract(job: Job) -> Page:
    """The title and text of a document. Raises `Unreadable`, or whatever a parser does with a hostile document."""
    kind = kind_of(job.content_type, job.body)
    if kind == "pdf":
        page = _pdf(job.body)
    elif kind == "html":
        page = _html(decode(job.body, job.charset), job)
    elif kind == "text":
        page = Page("", decode(job.body, job.charset))
    else:
        hint = " Use vision_analyze for pictures." if kind.startswith("image/") else ""
        raise Unreadable(f"It is {kind}, not text.{hint}")
    content = page.content.replace("\x00", "").strip()
    if not content:
        hint = " A page that needs JavaScript wants the browser." if kind == "html" else ""
        raise Unreadable(f"It has no readable text.{hint}")
    return Page(" ".join(page.title.split())[:500], content[:LONGEST_TEXT])


def kind_of(content_type: str, body: bytes) -> str:
    """`html`, `pdf`, `text`, or the content type of anything else; looks into the body where the type is vague."""
    main, _, sub = content_type.partition("/")
    if sub == "pdf" or body[:1_024].lstrip().startswith(b"%PDF-"):
        return "pdf"
    if sub in ("html", "xhtml+xml"):
        return "html"
    vague = sub in ("", "octet-stream", "plain", "unknown", "x-unknown")
    if vague and re.match(rb"\s*(<!doctype\s+html|<html[\s>])", body[:1_024], re.IGNORECASE):
        return "html"
    if main == "text" or any(sub == name or sub.endswith(("+" + name, "-" + name)) for name in _TEXT_TYPES):
        return "text"
    if vague and b"\x00" not in body[:8_192]:
        return "text"
    return content_type or "binary data"


def decode(body: bytes, charset: str = "") -> str:
    """Text of bytes: by byte order mark, then the server's word, the page's own, UTF-8, and a guess at last."""
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if body.startswith(mark):
            return body.decode(name, "replace")
    declared = _META_CHARSET.search(body[:4_096])
    for name in (charset, declared[1].decode("ascii", "replace") if declared else "", "utf-8"):
        for codec in _codecs(name):
            with contextlib.suppress(UnicodeError, LookupError):  # LookupError: rot13 and the like are no charsets
                return body.decode(codec)
    from charset_normalizer import from_bytes

    guess = from_bytes(body[:100_000]).best()
    return body.decode(guess.encoding if guess else "cp1252", "replace")


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`; where there is room for it, the end says what is missing."""
    note = f"\n\n[Cut: {len(text):,} characters in all; ask with a larger char_limit for more.]"
    return bounded(text, limit, note if limit >= 4 * len(note) else "…")


def _codecs(name: str) -> tuple[str, ...]:
    """What to try for a declared charset; nothing for an unknown one."""
    try:
        known = codecs.lookup(name)
    except LookupError:
        return ()
    # Servers say Latin-1 by default: what is valid UTF-8 is UTF-8 then, and else Windows-1252, as in browsers.
    return ("utf-8", "cp1252") if known.name in ("iso8859-1", "ascii", "cp1252") else (known.name,)


def _html(text: str, job: Job) -> Page:
    import trafilatura
    from lxml import etree, html

    try:
        tree = html.document_fromstring(_XML_DECLARATION.sub("", text).replace("\x00", ""))
    except etree.ParserError:  # nothing in it
        return Page("", "")
    title = tree.findtext(".//title") or ""
    if job.plain:
        for element in tree.xpath(f"{_FURNITURE}|{_HEADING_ANCHORS}"):
            element.drop_tree()
        return Page(title, trafilatura.html2txt(tree))
    if job.url:  # trafilatura resolves links against the host only
        tree.make_links_absolute(job.url, handle_failures="ignore")
    content = trafilatura.extract(
        tree,
        output_format="markdown",
        include_formatting=True,
        include_links=True,
        include_tables=True,
        include_comments=False,
        favor_recall=True,
        prune_xpath=_HEADING_ANCHORS,
    )
    return Page(title, content or trafilatura.html2txt(tree))


def _pdf(body: bytes) -> Page:
    import pypdf
    from pypdf.errors import PyPdfError

    try:
        reader = pypdf.PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("The PDF is locked with a password.")
        title = (reader.metadata.title if reader.metadata else "") or ""
        pages: list[str] = []
        size = 0
        for sheet in reader.pages:
            pages.append(sheet.extract_text())
            size += len(pages[-1])
            if size > LONGEST_TEXT:
                break
    except PyPdfError as error:
        raise Unreadable(f"The PDF is damaged: {error}.") from None
    if not size:
        raise Unreadable("The PDF has no text, only pictures of it.")
    return Page(title, "\n\n".join(pages))


def serve(seconds: float, memory: int) -> None:
    """Be the pool's child: `seconds` of wall time a document, `memory` bytes of address space in all."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    jobs, answers = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Encoder()
    source, target = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a parser prints must not come between the frames
    while len(head := source.read(4)) == 4:
        job = jobs.decode(source.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action ends the process, wherever it is
        try:
            answer = Answer(extract(job))
        except Unreadable as error:
            answer = Answer(error=str(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        data = answers.encode(answer)
        target.write(len(data).to_bytes(4, "big") + data)
        target.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
