"""The toolset `vision`: vision_analyze looks at a picture with a model that can see.

A picture comes from the web (under the address rules), from a data URL, or from the sandbox. Before a model sees it,
Pillow opens it: its type and size are checked, an animation becomes its first frame, it is turned as its EXIF data
says, made smaller where it is large, and written anew, so that no metadata of it leaves.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.util
import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from gristmill.config import host_of, is_loopback
from gristmill.errors import ModelError
from gristmill.tools.addresses import guarded_session
from gristmill.tools.base import NOTHING, Access, Tool, ToolContext, Toolset
from gristmill.tools.fetch import FetchError, fetch
from gristmill.types import ToolSchema

SOURCE_LIMIT = 20_000_000  # bytes of a picture as it comes
PIXEL_LIMIT = 50_000_000  # of a picture as it comes; decoded it takes four bytes each
SIDE_LIMIT = 1_568  # pixels of the longer side that a model gets; providers scale larger ones down themselves
PNG_LIMIT = 2_500_000  # bytes; a larger one becomes a JPEG, to stay under 5 MB as base64
FETCH_SECONDS = 30.0
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


class PictureError(Exception):
    """There is no picture to look at; the text says why."""


async def vision_analyze(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the model says of the picture."""
    try:
        data = await _load(context, arguments["image_url"].strip())
    except (PictureError, FetchError) as error:
        return {"success": False, "error": str(error)}
    return await look(context, data, arguments["question"])


async def look(context: ToolContext, data: bytes, question: str) -> dict[str, Any]:
    """Ask the session's vision model about a picture's bytes: `{"success", "analysis"}`, or `{"success", "error"}`."""
    if context.vision is None:
        return {"success": False, "error": "No vision model is configured; VISION_MODEL names one."}
    try:
        url = await asyncio.to_thread(picture_url, data)
        answer = await context.vision.ask(question, [url])
    except PictureError as error:
        return {"success": False, "error": str(error)}
    except ModelError as error:  # the session's own model is not at fault, so the session goes on
        return {"success": False, "error": f"The vision model failed: {error.message}"}
    if not answer.strip():
        return {"success": False, "error": "The vision model gave an empty answer."}
    return {"success": True, "analysis": answer}


def picture_url(data: bytes) -> str:
    """A picture as a data URL that any provider takes: PNG or JPEG, at most `SIDE_LIMIT` pixels a side, no metadata.

    Blocks for as long as decoding takes. Raises `PictureError` for what is no whole picture of a known type and size.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > PIXEL_LIMIT:
                raise PictureError(f"The picture has {width} × {height} pixels; {PIXEL_LIMIT:,} are the most.")
            lossy = picture.format in ("JPEG", "WEBP")
            clear = picture.has_transparency_data
            picture.draft("RGB", (SIDE_LIMIT, SIDE_LIMIT))  # a large JPEG is decoded at a fraction of its size
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):
                upright = upright.point(lambda level: level / 256, "L")
            pixels = upright.convert("RGBA" if clear else "RGB")
            pixels.thumbnail((SIDE_LIMIT, SIDE_LIMIT))
    except UnidentifiedImageError:
        raise PictureError(f"It is no picture of a known type ({', '.join(FORMATS)}).") from None
    except Image.DecompressionBombError:
        raise PictureError(f"The picture has more than {PIXEL_LIMIT:,} pixels.") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:  # what Pillow's decoders raise
        raise PictureError(f"The picture is damaged: {error}.") from None

    png = b"" if lossy and not clear else _encode(pixels, "PNG")
    if png and len(png) <= PNG_LIMIT:
        return _data_url("png", png)
    if clear:
        paper = Image.new("RGBA", pixels.size, "white")
        pixels = Image.alpha_composite(paper, pixels).convert("RGB")
    return _data_url("jpeg", _encode(pixels, "JPEG"))


def _encode(pixels: Any, kind: str) -> bytes:
    pixels.info.clear()  # what a picture says of itself (EXIF, comments, profiles) would be written with it
    out = io.BytesIO()
    pixels.save(out, kind, **({"quality": 88} if kind == "JPEG" else {"compress_level": 4}))
    return out.getvalue()


def _data_url(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


async def _load(context: ToolContext, source: str) -> bytes:
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        data = _from_data_url(source)
    elif scheme.startswith(("http://", "https://")):
        data = await _from_web(context, source)
    elif "://" in source or scheme.startswith("file:"):
        raise PictureError("Give an http or https URL, a data URL, or the path of a file in the sandbox.")
    else:
        data = await _from_sandbox(context, source)
    if not data:
        raise PictureError("The picture is empty.")
    if len(data) > SOURCE_LIMIT:
        raise PictureError(f"The picture is larger than {SOURCE_LIMIT:,} bytes.")
    return data


def _from_data_url(url: str) -> bytes:
    head, comma, payload = url[5:].partition(",")
    if not comma:
        raise PictureError("The data URL has no comma before its data.")
    if len(payload) > 3 * SOURCE_LIMIT:
        raise PictureError(f"The picture is larger than {SOURCE_LIMIT:,} bytes.")
    data = unquote_to_bytes(payload)
    if not head.lower().endswith(";base64"):
        return data
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error as error:
        raise PictureError(f"The data URL is not valid base64: {error}.") from None


async def _from_web(context: ToolContext, url: str) -> bytes:
    session = context.shared.get("vision")
    if session is None:
        context.shared["vision"] = session = guarded_session(context.allow_private_urls)
        context.shared_closers.append(session.close)
    found = await fetch(
        session,
        url,
        limit=SOURCE_LIMIT,
        seconds=FETCH_SECONDS,
        allow_private=context.allow_private_urls,
        accept="image/png,image/jpeg,image/webp,image/gif,image/*;q=0.8",
    )
    return found.body


async def _from_sandbox(context: ToolContext, path: str) -> bytes:
    try:
        return await context.sandbox.read(path, SOURCE_LIMIT + 1)
    except FileNotFoundError:
        raise PictureError(f"There is no file {path} in the sandbox.") from None
    except IsADirectoryError:
        raise PictureError(f"{path} is a directory.") from None
    except (PermissionError, ValueError) as error:
        raise PictureError(f"{path} cannot be read: {error}.") from None


def _access(arguments: dict[str, Any]) -> Access:
    source = str(arguments.get("image_url", ""))
    return NOTHING if ":" in source[:8] else Access(("sandbox", source))


def missing_for_vision(settings: Mapping[str, str]) -> str:
    """What vision_analyze lacks here, as a sentence; empty where it can work."""
    if not importlib.util.find_spec("PIL"):
        return "Looking at pictures needs Pillow: pip install 'gristmill[vision]'."
    base = settings.get("VISION_BASE_URL", "")
    host = host_of(base)
    if not base:
        return ""
    if not host:
        return f"VISION_BASE_URL must be an http or https address, not {base!r}."
    if not settings.get("VISION_MODEL"):
        return "Looking at pictures with VISION_BASE_URL needs VISION_MODEL too."
    if not settings.get("VISION_API_KEY") and not is_loopback(host):
        return f"Looking at pictures at {host} needs VISION_API_KEY."
    return ""


_ANALYZE = Tool(
    schema=ToolSchema(
        name="vision_analyze",
        description=(
            "Look at a picture and answer a question about it: describe it, read its text, compare, count. "
            "Takes PNG, JPEG, GIF, WebP, BMP and TIFF."
        ),
        parameters={
            "type": "object",
            "properties": {
                "image_url": {
                    "type": "string",
                    "minLength": 1,
                    "description": "An http or https URL, a data URL, or the path of a file in the sandbox.",
                },
                "question": {"type": "string", "minLength": 1, "description": "What you want to know of it."},
            },
            "required": ["image_url", "question"],
        },
    ),
    toolset="vision",
    run=vision_analyze,
    access=_access,
)

VISION = Toolset("vision", (_ANALYZE,), missing_for_vision)
