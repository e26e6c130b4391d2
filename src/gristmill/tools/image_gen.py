"""The toolset `image_gen`: image_generate has a picture drawn and puts it into the sandbox.

Three ways, chosen by the settings:

- `IMAGE_BASE_URL` (on openrouter.ai), `IMAGE_MODEL`, `IMAGE_API_KEY`: OpenRouter, chat completions with `modalities`.
- `IMAGE_BASE_URL`, `IMAGE_MODEL`, `IMAGE_API_KEY` (not needed on loopback): an OpenAI-compatible `/images/generations`.
- `FAL_KEY`, and `IMAGE_MODEL` where it is another than `FAL_MODEL`: FAL's queue.

A key goes to its own host only. Where an answer is a link, the picture is fetched without any key, under the address
rules, except from the very server that was asked.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from gristmill.config import host_of, is_loopback
from gristmill.tools.addresses import guarded_session
from gristmill.tools.base import Tool, ToolContext, Toolset
from gristmill.tools.fetch import MAX_REDIRECTS, FetchError, fetch
from gristmill.tools.json_api import ApiError, ask_json, error_text
from gristmill.types import ToolSchema

FAL_MODEL = "fal-ai/flux/schnell"
DRAW_SECONDS = 180.0  # of one picture
FETCH_SECONDS = 60.0
PICTURE_LIMIT = 30_000_000  # bytes
ANSWER_LIMIT = 2 * PICTURE_LIMIT  # bytes of an answer that holds the picture as base64
TRIES = 2  # each may be paid for
ASPECTS = ("landscape", "square", "portrait")
_SIGNATURES = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"RIFF....WEBP", "webp"))


@dataclass(frozen=True)
class _Clients:
    """What the sessions of a worker share: `api` for the drawing servers, `web` for links to pictures."""

    api: aiohttp.ClientSession
    web: aiohttp.ClientSession
    allow_private: bool


class Artist(ABC):
    """A service that draws. Failures are `ApiError` and `FetchError`.

    Args:
        base_url: where it is; the only host that gets `key`.
        model: the provider's name of a model.
    """

    scheme = "Bearer"  # of the Authorization header

    def __init__(self, base_url: str, model: str, key: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.headers = {"Authorization": f"{self.scheme} {key}"} if key else {}

    @abstractmethod
    async def draw(self, clients: _Clients, prompt: str, aspect: str) -> str | bytes:
        """The picture's bytes, or a link to it (http or data URL)."""

    async def _post(self, clients: _Clients, url: str, body: dict[str, Any]) -> Any:
        return await ask_json(
            *(clients.api, "POST", url),
            headers=self.headers,
            body=body,
            seconds=DRAW_SECONDS,
            tries=TRIES,
            limit=ANSWER_LIMIT,
        )


class OpenAIImages(Artist):
    """Source: platform.openai.com/docs/api-reference/images/create: data[0] has `b64_json` or `url`.

    `response_format` is left out, since the gpt-image models refuse it; both forms of answer are understood.
    """

    async def draw(self, clients: _Clients, prompt: str, aspect: str) -> str | bytes:
        """One request."""
        wide, tall = ("1792x1024", "1024x1792") if "dall-e-3" in self.model else ("1536x1024", "1024x1536")
        size = {"landscape": wide, "portrait": tall}.get(aspect, "1024x1024")
        body = {"model": self.model, "prompt": prompt, "n": 1, "size": size}
        answer = await self._post(clients, f"{self.base_url}/images/generations", body)
        first = _first(answer, "data")
        if first.get("b64_json"):
            return _decode(str(first["b64_json"]))
        return _link(first.get("url"), answer)


class OpenRouterImages(Artist):
    """Source: openrouter.ai/docs, Image Generation: chat completions with `modalities` and `image_config.aspect_ratio`;
    choices[0].message.images[0].image_url.url is a data URL. Models that give pictures only refuse the modality `text`.
    """

    async def draw(self, clients: _Clients, prompt: str, aspect: str) -> str | bytes:
        """One request, and a second one for models without text."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "modalities": ["image", "text"],
            "image_config": {"aspect_ratio": {"landscape": "16:9", "portrait": "9:16"}.get(aspect, "1:1")},
        }
        url = f"{self.base_url}/chat/completions"
        try:
            answer = await self._post(clients, url, body)
        except ApiError as error:
            if error.status not in (400, 404) or "modalit" not in str(error):
                raise
            answer = await self._post(clients, url, {**body, "modalities": ["image"]})
        message = _first(answer, "choices").get("message") or {}
        if not message.get("images"):
            said = str(message.get("refusal") or message.get("content") or "").strip()
            raise ApiError(f"{self.model} answered without a picture{': ' + said[:300] if said else '.'}")
        return _link((_first(message, "images").get("image_url") or {}).get("url"), answer)


class FalQueue(Artist):
    """Source: docs.fal.ai/documentation/model-apis/inference/queue: POST to queue.fal.run/<model> gives `status_url`
    and `response_url`; the status goes IN_QUEUE, IN_PROGRESS, COMPLETED; the response has images[0].url.
    """

    scheme = "Key"
    poll = 0.5  # seconds before the first look at the status; then half as long again each time, up to five seconds
    patience = DRAW_SECONDS  # until it must be done

    async def draw(self, clients: _Clients, prompt: str, aspect: str) -> str | bytes:
        """Submit, look until it is done, and take the result; a picture that takes too long is called off."""
        size = {"landscape": "landscape_16_9", "portrait": "portrait_16_9"}.get(aspect, "square_hd")
        body = {"prompt": prompt, "image_size": size, "num_images": 1}
        ticket = await self._post(clients, f"{self.base_url}/{self.model}", body)
        status_url, response_url = self._own(ticket, "status_url"), self._own(ticket, "response_url")
        end, wait = time.monotonic() + self.patience, self.poll
        while True:
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, 5.0)
            state = await ask_json(clients.api, "GET", status_url, headers=self.headers)
            if not isinstance(state, dict) or state.get("error"):
                raise ApiError(f"FAL failed: {error_text(state)[:300]}.")
            if state.get("status") == "COMPLETED":
                break
            if time.monotonic() > end:
                with contextlib.suppress(ApiError):
                    await ask_json(clients.api, "PUT", self._own(ticket, "cancel_url"), headers=self.headers, tries=1)
                raise ApiError(f"FAL did not finish within {self.patience:g} seconds.")
        answer = await ask_json(clients.api, "GET", response_url, headers=self.headers, limit=ANSWER_LIMIT)
        return _link(_first(answer, "images").get("url"), answer)

    def _own(self, ticket: Any, name: str) -> str:
        """A URL of the ticket, which the key may be sent to because it is on FAL's own host."""
        url = str(ticket.get(name) or "") if isinstance(ticket, dict) else ""
        if urlsplit(url)[:2] != urlsplit(self.base_url)[:2]:
            raise ApiError(f"FAL answered without a usable {name}.")
        return url


def choose_artist(settings: Mapping[str, str]) -> Artist | None:
    """Who draws with these settings; None where they name nobody."""
    base, model, key = (settings.get(f"IMAGE_{name}", "") for name in ("BASE_URL", "MODEL", "API_KEY"))
    if base and model:
        host = host_of(base)
        if not host or (not key and not is_loopback(host)):
            return None
        openrouter = host == "openrouter.ai" or host.endswith(".openrouter.ai")
        return (OpenRouterImages if openrouter else OpenAIImages)(base, model, key)
    if settings.get("FAL_KEY") and not base:
        return FalQueue("https://queue.fal.run", model or FAL_MODEL, settings["FAL_KEY"])
    return None


def missing_for_images(settings: Mapping[str, str]) -> str:
    """What image_generate lacks here, as a sentence; empty where it can work."""
    if choose_artist(settings) is not None:
        return ""
    base = settings.get("IMAGE_BASE_URL", "")
    if base and not host_of(base):
        return f"IMAGE_BASE_URL must be an http or https address, not {base!r}."
    if base:
        name = "IMAGE_API_KEY" if settings.get("IMAGE_MODEL") else "IMAGE_MODEL"
        return f"Drawing pictures with IMAGE_BASE_URL needs {name} too."
    return (
        "Drawing pictures needs FAL_KEY, or IMAGE_BASE_URL, IMAGE_MODEL and IMAGE_API_KEY "
        "of OpenRouter or of any server with OpenAI's images API."
    )


async def image_generate(context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Draw with whom the settings name."""
    artist = choose_artist(context.settings)
    if artist is None:
        return {"success": False, "error": missing_for_images(context.settings)}
    return await generate(context, artist, arguments["prompt"], arguments.get("aspect_ratio", "landscape"))


async def generate(context: ToolContext, artist: Artist, prompt: str, aspect: str) -> dict[str, Any]:
    """Have a picture drawn and written into the sandbox: `{"success", "image": its path}` or `{"success", "error"}`."""
    number = context.state["image_gen"] = context.state.get("image_gen", 0) + 1
    clients = _clients(context)
    try:
        drawn = await artist.draw(clients, prompt, aspect)
        data = drawn if isinstance(drawn, bytes) else await _fetch_picture(clients, artist, drawn)
        kind = next((kind for signature, kind in _SIGNATURES if re.match(signature, data, re.DOTALL)), "")
        if not kind:
            raise ApiError("What was drawn is no PNG, JPEG, GIF or WebP picture.")
    except (ApiError, FetchError) as error:
        return {"success": False, "error": str(error)}
    path = f"{context.sandbox.workspace.rstrip('/')}/images/generated-{number}.{kind}"
    try:
        await context.sandbox.write(path, data)
    except (PermissionError, IsADirectoryError) as error:
        return {"success": False, "error": f"The picture cannot be written to {path}: {error}."}
    return {"success": True, "image": path}


async def _fetch_picture(clients: _Clients, artist: Artist, url: str) -> bytes:
    if url.startswith("data:"):
        return _decode(url.partition(",")[2])
    # A server of one's own may link to itself, whatever its address; no redirect leads on from there.
    own = urlsplit(url)[:2] == urlsplit(artist.base_url)[:2]
    session = clients.api if own else clients.web
    found = await fetch(
        session,
        url,
        limit=PICTURE_LIMIT,
        seconds=FETCH_SECONDS,
        allow_private=own or clients.allow_private,
        redirects=0 if own else MAX_REDIRECTS,
    )
    return found.body


def _first(answer: Any, name: str) -> dict[str, Any]:
    """The first object of a list in an answer. Raises `ApiError` where there is none."""
    found = answer.get(name) if isinstance(answer, dict) else None
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return found[0]
    said = error_text(answer)[:300] if isinstance(answer, dict) else ""
    raise ApiError(f"The answer holds no picture{': ' + said if said else '.'}")


def _link(url: object, answer: Any) -> str:
    if isinstance(url, str) and url.startswith(("http://", "https://", "data:image/")):
        return url
    raise ApiError(f"The answer holds no picture{': ' + said if (said := error_text(answer)[:300]) else '.'}")


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ApiError("The picture in the answer is not valid base64.") from None
    if len(data) > PICTURE_LIMIT:
        raise ApiError(f"The picture is larger than {PICTURE_LIMIT:,} bytes.")
    return data


def _clients(context: ToolContext) -> _Clients:
    clients = context.shared.get("image_gen")
    if isinstance(clients, _Clients):
        return clients
    api = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
    web = guarded_session(context.allow_private_urls)
    context.shared["image_gen"] = clients = _Clients(api, web, context.allow_private_urls)
    context.shared_closers += [api.close, web.close]
    return clients


_GENERATE = Tool(
    schema=ToolSchema(
        name="image_generate",
        description=(
            "Draw a picture from a description. It is written into the sandbox; the result gives its path, which "
            "vision_analyze and the terminal can use."
        ),
        parameters={
            "type": "object",
            "properties": {
                "prompt": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 8000,
                    "description": "What to draw: subject, style, light, composition.",
                },
                "aspect_ratio": {
                    "type": "string",
                    "enum": list(ASPECTS),
                    "default": "landscape",
                    "description": "The picture's shape.",
                },
            },
            "required": ["prompt"],
        },
    ),
    toolset="image_gen",
    run=image_generate,
)

IMAGE_GEN = Toolset("image_gen", (_GENERATE,), missing_for_images)
