"""image_generate: small servers draw with Pillow behind each documented protocol; they are no image models."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from gristmill.tools.base import succeeded
from gristmill.tools.image_gen import (
    IMAGE_GEN,
    FalQueue,
    OpenAIImages,
    OpenRouterImages,
    choose_artist,
    generate,
    image_generate,
)

KEY = "canary-key-1234567890"


def drawn(width: int = 30, height: int = 20, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "green").save(out, kind)
    return out.getvalue()


class Server:
    """Draws what the size asks for, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.answers: list[tuple[int, Any]] = []  # given first, one each

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((request.path, dict(request.headers), body))
        if self.answers and request.method == "POST":
            status, answer = self.answers.pop(0)
            return web.json_response(answer, status=status, headers={"Retry-After": "0.01"})
        if request.path.endswith("/picture.png"):
            return web.Response(body=drawn(), content_type="image/png")
        return self.draw(request, body)

    def draw(self, request: web.Request, body: Any) -> web.Response:
        raise NotImplementedError


class OpenAI(Server):
    links = False

    def draw(self, request: web.Request, body: Any) -> web.Response:
        assert request.path == "/v1/images/generations" and set(body) == {"model", "prompt", "n", "size"}
        width, height = map(int, body["size"].split("x"))
        if self.links:
            return web.json_response({"data": [{"url": str(request.url.with_path("/files/picture.png"))}]})
        picture = base64.b64encode(drawn(width // 16, height // 16)).decode()
        return web.json_response({"created": 1, "data": [{"b64_json": picture}]})


class OpenRouter(Server):
    images_only = False

    def draw(self, request: web.Request, body: Any) -> web.Response:
        assert request.path == "/api/v1/chat/completions"
        if self.images_only and body["modalities"] != ["image"]:
            said = "No endpoints found that support the requested output modalities: image, text"
            return web.json_response({"error": {"message": said, "code": 404}}, status=404)
        wide, tall = map(int, body["image_config"]["aspect_ratio"].split(":"))
        url = "data:image/jpeg;base64," + base64.b64encode(drawn(wide * 4, tall * 4, "JPEG")).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "", "images": [image]}}]})


class Fal(Server):
    looks = 2  # at the status before it is done
    fails = False
    elsewhere = ""

    def draw(self, request: web.Request, body: Any) -> web.Response:
        base = request.url.origin()
        here = f"{self.elsewhere or base}/fal-ai/flux/requests/7"
        if request.path == "/fal-ai/flux/schnell":
            self.size = body["image_size"]
            return web.json_response(
                {
                    "request_id": "7",
                    "status_url": f"{here}/status",
                    "response_url": here,
                    "cancel_url": f"{here}/cancel",
                }
            )
        if request.path.endswith("/status"):
            self.looks -= 1
            state = ("COMPLETED", "IN_PROGRESS", "IN_QUEUE")[max(0, min(self.looks, 2))]
            return web.json_response({"status": state}, status=200 if state == "COMPLETED" else 202)
        if self.fails:
            return web.json_response({"detail": [{"msg": "content policy violation"}]}, status=422)
        return web.json_response({"images": [{"url": f"{base}/files/picture.png", "content_type": "image/png"}]})


@pytest.fixture
def started(serve):
    async def start(server: Server) -> str:
        return str((await serve({"/*": server.handle})).make_url("")).rstrip("/")

    return start


def size_of(result: dict[str, Any]) -> tuple[int, int]:
    assert set(result) == {"success", "image"} and result["success"] is True, result
    with Image.open(result["image"]) as picture:
        return picture.size


@pytest.mark.parametrize(
    ("model", "aspect", "asked"),
    [
        ("gpt-image-1", "landscape", "1536x1024"),
        ("gpt-image-1", "square", "1024x1024"),
        ("gpt-image-1", "portrait", "1024x1536"),
        ("dall-e-3", "landscape", "1792x1024"),
        ("dall-e-3", "portrait", "1024x1792"),
    ],
)
async def test_openai_images(started, context, model: str, aspect: str, asked: str) -> None:
    server = OpenAI()
    url = await started(server)
    session = context(IMAGE_BASE_URL=f"{url}/v1/", IMAGE_MODEL=model, IMAGE_API_KEY=KEY)
    result = await image_generate(session, {"prompt": "a mill", "aspect_ratio": aspect})
    width, height = map(int, asked.split("x"))
    assert size_of(result) == (width // 16, height // 16)
    assert result["image"] == f"{session.sandbox.workspace}/images/generated-1.png"
    _, headers, body = server.asked[0]
    assert body == {"model": model, "prompt": "a mill", "n": 1, "size": asked}
    assert headers["Authorization"] == f"Bearer {KEY}"


async def test_openai_images_as_links_are_fetched_without_the_key(started, context) -> None:
    server = OpenAI()
    server.links = True
    url = await started(server)
    # Private addresses are not allowed, but the server that was asked is the user's own.
    session = context(IMAGE_BASE_URL=f"{url}/v1", IMAGE_MODEL="sd", IMAGE_API_KEY=KEY)
    assert size_of(await image_generate(session, {"prompt": "a mill"})) == (30, 20)
    (_, asked, body), (path, fetched, _) = server.asked
    assert body["size"] == "1536x1024" and path == "/files/picture.png"
    assert KEY in asked["Authorization"] and not any(KEY in value for value in fetched.values())


async def test_a_link_into_a_private_network_is_refused(started, context, serve) -> None:
    reached = []

    async def secret(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(body=drawn())

    other = await serve({"/*": secret})
    server = OpenAI()
    url = await started(server)
    session = context(IMAGE_BASE_URL=f"{url}/v1", IMAGE_MODEL="sd")
    for link in (str(other.make_url("/x.png")), "http://169.254.169.254/x", "file:///etc/passwd"):
        server.answers = [(200, {"data": [{"url": link}]})]
        result = await image_generate(session, {"prompt": "x"})
        assert result["success"] is False and result["error"]
    assert reached == []


async def test_pictures_of_a_session_have_names_of_their_own_also_at_once(started, context) -> None:
    url = await started(OpenAI())
    session = context(IMAGE_BASE_URL=f"{url}/v1", IMAGE_MODEL="sd")
    results = await asyncio.gather(*(image_generate(session, {"prompt": f"mill {n}"}) for n in range(5)))
    assert sorted(Path(result["image"]).name for result in results) == [f"generated-{n}.png" for n in range(1, 6)]
    assert len(session.shared_closers) == 2


@pytest.mark.parametrize("aspect", ["landscape", "square", "portrait"])
@pytest.mark.parametrize("images_only", [False, True])
async def test_openrouter(started, context, aspect: str, images_only: bool) -> None:
    server = OpenRouter()
    server.images_only = images_only
    artist = OpenRouterImages(f"{await started(server)}/api/v1", "google/gemini-2.5-flash-image", KEY)
    result = await generate(context(), artist, "a mill", aspect)
    assert size_of(result) == {"landscape": (64, 36), "square": (4, 4), "portrait": (36, 64)}[aspect]
    assert result["image"].endswith("generated-1.jpg")
    assert len(server.asked) == 1 + images_only
    assert server.asked[-1][2]["modalities"] == (["image"] if images_only else ["image", "text"])
    assert server.asked[-1][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(("aspect", "size"), [("landscape", "landscape_16_9"), ("square", "square_hd")])
async def test_fal(started, context, aspect: str, size: str) -> None:
    server = Fal()
    artist = FalQueue(await started(server), "fal-ai/flux/schnell", KEY)
    artist.poll = 0.01
    assert size_of(await generate(context(private=True), artist, "a mill", aspect)) == (30, 20)
    assert server.size == size
    keys = [headers.get("Authorization") for _, headers, _ in server.asked]
    paths = [path for path, _, _ in server.asked]
    assert paths[-1] == "/files/picture.png" and keys[-1] is None
    assert set(keys[:-1]) == {f"Key {KEY}"} and paths[-2] == "/fal-ai/flux/requests/7"
    assert sum(path.endswith("/status") for path in paths) == 2


async def test_fal_sends_its_key_to_no_other_host(started, context) -> None:
    server, thief = Fal(), Fal()
    server.elsewhere = await started(thief)
    artist = FalQueue(await started(server), "fal-ai/flux/schnell", KEY)
    result = await generate(context(private=True), artist, "a mill", "square")
    assert result == {"success": False, "error": "FAL answered without a usable status_url."}
    assert thief.asked == []


async def test_fal_that_fails_or_takes_too_long(started, context) -> None:
    server = Fal()
    artist = FalQueue(await started(server), "fal-ai/flux/schnell", KEY)
    artist.poll = 0.01
    server.fails = True
    result = await generate(context(), artist, "a mill", "square")
    assert result["success"] is False and "content policy violation" in result["error"]

    server.looks = 10**9
    artist.patience = 0.05
    result = await generate(context(), artist, "a mill", "square")
    assert result["error"] == "FAL did not finish within 0.05 seconds."
    assert server.asked[-1][0] == "/fal-ai/flux/requests/7/cancel"


@pytest.mark.parametrize(
    ("answers", "says", "requests"),
    [
        ([(500, {}), (200, {"data": [{"b64_json": base64.b64encode(drawn()).decode()}]})], "", 2),
        ([(500, {"error": {"message": "busy"}})] * 2, "HTTP 500: busy", 2),
        ([(400, {"error": {"message": "Your request was rejected by the safety system"}})], "safety system", 1),
        ([(401, {"error": {"message": f"bad key {KEY}"}})], "bad key [key]", 1),
        ([(200, {"data": []})], "holds no picture", 1),
        ([(200, {"error": {"message": "no quota"}})], "holds no picture: no quota", 1),
        ([(200, [1])], "holds no picture", 1),
        ([(200, {"data": [{"b64_json": "####"}]})], "not valid base64", 1),
        ([(200, {"data": [{"url": "javascript:x"}]})], "holds no picture", 1),
        ([(200, {"data": [{"b64_json": base64.b64encode(b"<svg/>").decode()}]})], "no PNG, JPEG, GIF or WebP", 1),
        ([(200, {"data": [{"b64_json": base64.b64encode(b"RIFF1234WAVE").decode()}]})], "no PNG, JPEG, GIF or WebP", 1),
    ],
)
async def test_failures_are_results(started, context, answers: list[tuple[int, Any]], says: str, requests: int) -> None:
    server = OpenAI()
    server.answers = list(answers)
    session = context(IMAGE_BASE_URL=f"{await started(server)}/v1", IMAGE_MODEL="sd", IMAGE_API_KEY=KEY)
    result = await image_generate(session, {"prompt": "a mill"})
    assert len(server.asked) == requests
    assert succeeded(result, is_json=True)[0] is not bool(says)
    if says:
        assert says in result["error"] and KEY not in result["error"]
        assert not Path(session.sandbox.workspace, "images").exists()


async def test_openrouter_that_answers_with_words(started, context) -> None:
    server = OpenRouter()
    server.answers = [(200, {"choices": [{"message": {"content": "I cannot draw that."}}]})]
    artist = OpenRouterImages(f"{await started(server)}/api/v1", "some/model", KEY)
    result = await generate(context(), artist, "a mill", "square")
    assert result["error"] == "some/model answered without a picture: I cannot draw that."


@pytest.mark.parametrize(
    ("settings", "kind", "missing"),
    [
        ({}, None, "FAL_KEY, or IMAGE_BASE_URL, IMAGE_MODEL and IMAGE_API_KEY"),
        ({"IMAGE_API_KEY": "k"}, None, "FAL_KEY, or IMAGE_BASE_URL, IMAGE_MODEL and IMAGE_API_KEY"),
        ({"IMAGE_BASE_URL": "https://api.openai.com/v1", "IMAGE_API_KEY": "k"}, None, "IMAGE_MODEL"),
        ({"IMAGE_BASE_URL": "https://api.openai.com/v1", "IMAGE_MODEL": "m"}, None, "IMAGE_API_KEY"),
        ({"IMAGE_BASE_URL": "https://api.openai.com/v1", "IMAGE_MODEL": "m", "FAL_KEY": "f"}, None, "IMAGE_API_KEY"),
        ({"IMAGE_BASE_URL": "https://api.openai.com/v1", "IMAGE_MODEL": "m", "IMAGE_API_KEY": "k"}, OpenAIImages, ""),
        ({"IMAGE_BASE_URL": "http://127.0.0.1:1/v1", "IMAGE_MODEL": "m"}, OpenAIImages, ""),
        (
            {"IMAGE_BASE_URL": "https://openrouter.ai/api/v1", "IMAGE_MODEL": "m", "IMAGE_API_KEY": "k"},
            OpenRouterImages,
            "",
        ),
        ({"IMAGE_BASE_URL": "https://notopenrouter.ai/v1", "IMAGE_MODEL": "m", "IMAGE_API_KEY": "k"}, OpenAIImages, ""),
        ({"FAL_KEY": "f"}, FalQueue, ""),
        ({"IMAGE_BASE_URL": "localhost:8000", "IMAGE_MODEL": "m"}, None, "must be an http or https address"),
        ({"IMAGE_BASE_URL": "http://[bad", "IMAGE_MODEL": "m", "FAL_KEY": "f"}, None, "must be an http"),
    ],
)
def test_who_draws_follows_from_the_settings(settings: dict[str, str], kind: type | None, missing: str) -> None:
    artist = choose_artist(settings)
    assert type(artist) is (kind or type(None))
    assert missing in IMAGE_GEN.missing(settings) and bool(IMAGE_GEN.missing(settings)) is bool(missing)
    if isinstance(artist, FalQueue):
        assert artist.base_url == "https://queue.fal.run" and artist.model == "fal-ai/flux/schnell"


async def test_without_settings_the_call_says_what_is_missing(context) -> None:
    result = await image_generate(context(), {"prompt": "a mill"})
    assert result["success"] is False and "FAL_KEY" in result["error"]
