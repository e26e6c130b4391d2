"""vision_analyze: pictures made with Pillow, from everywhere they may come from, looked at by a scripted model."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import struct
import zlib

import pytest
from aiohttp import web
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from gristmill.errors import ErrorKind, ModelError
from gristmill.tools.base import AskModel, succeeded
from gristmill.tools.vision import PIXEL_LIMIT, SIDE_LIMIT, VISION, PictureError, picture_url, vision_analyze

RED, BLUE = (200, 30, 30), (30, 30, 200)


def drawn(kind: str = "PNG", size: tuple[int, int] = (64, 32), mode: str = "RGB", **options: object) -> bytes:
    """A picture with a red left and a blue right half."""
    picture = Image.new("RGB", size, RED)
    ImageDraw.Draw(picture).rectangle((size[0] // 2, 0, *size), fill=BLUE)
    out = io.BytesIO()
    picture.convert(mode).save(out, kind, **options)
    return out.getvalue()


def opened(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == f"data:image/{picture.format.lower()};base64"
    picture.load()
    return picture


def near(picture: Image.Image, x: int, y: int, color: tuple[int, int, int]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(picture.convert("RGB").getpixel((x, y)), color, strict=True))


class Looker:
    """A model that says what it was shown."""

    def __init__(self, answer: str | Exception = "a red and a blue half") -> None:
        self.answer = answer
        self.asked: list[tuple[str, Image.Image]] = []

    async def ask(self, question: str, urls: list[str]) -> str:
        self.asked += [(question, opened(url)) for url in urls]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def port(self) -> AskModel:
        return AskModel(ask=self.ask, model="looker")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_every_known_type_becomes_png_or_jpeg(kind: str) -> None:
    picture = opened(picture_url(drawn(kind)))
    assert picture.format == ("JPEG" if kind in ("JPEG", "WEBP") else "PNG") and picture.size == (64, 32)
    assert near(picture, 8, 16, RED) and near(picture, 56, 16, BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_keeps_its_light_and_dark(mode: str) -> None:
    light = Image.new("L", (40, 20), 230)
    ImageDraw.Draw(light).rectangle((20, 0, 40, 20), fill=10)
    if mode == "I;16":
        light = light.convert("I").point(lambda level: level * 257).convert("I;16")
    else:
        light = light.convert("RGB").convert(mode) if mode in ("CMYK", "RGBA") else light.convert(mode)
    out = io.BytesIO()
    light.save(out, "TIFF")
    picture = opened(picture_url(out.getvalue())).convert("L")
    assert picture.getpixel((5, 10)) > 200 and picture.getpixel((35, 10)) < 40


def test_large_pictures_are_made_smaller_and_keep_their_shape() -> None:
    for kind in ("PNG", "JPEG"):
        picture = opened(picture_url(drawn(kind, (4000, 1000))))
        assert picture.size == (SIDE_LIMIT, SIDE_LIMIT // 4)
        assert near(picture, 300, 200, RED) and near(picture, 1300, 200, BLUE)
    assert opened(picture_url(drawn(size=(10, 3000)))).size == (round(SIDE_LIMIT / 300), SIDE_LIMIT)


def test_a_png_that_does_not_pack_becomes_a_jpeg_on_white() -> None:
    noise = Image.frombytes("RGBA", (900, 900), random.Random(1).randbytes(900 * 900 * 4))
    noise.paste((0, 0, 0, 0), (0, 0, 300, 300))
    out = io.BytesIO()
    noise.save(out, "PNG")
    url = picture_url(out.getvalue())
    picture = opened(url)
    assert picture.format == "JPEG" and len(url) < 5_000_000
    assert near(picture, 100, 100, (255, 255, 255))


def test_transparency_stays() -> None:
    out = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 255, 0, 0)).save(out, "WEBP", lossless=True)
    picture = opened(picture_url(out.getvalue()))
    assert picture.mode == "RGBA" and picture.getpixel((1, 1))[3] == 0


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (30, 30), color) for color in (RED, BLUE, BLUE)]
    for kind in ("GIF", "WEBP"):
        out = io.BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=50)
        picture = opened(picture_url(out.getvalue()))
        assert getattr(picture, "n_frames", 1) == 1 and near(picture, 15, 15, RED)


def test_metadata_does_not_leave_but_the_picture_is_turned_as_it_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    exif[0x010E] = "canary-exif"
    exif.get_ifd(0x8825)[1] = "N"  # a place
    notes = PngInfo()
    notes.add_text("Comment", "canary-text")
    for data in (drawn("JPEG", exif=exif, comment=b"canary-comment"), drawn("PNG", exif=exif, pnginfo=notes)):
        assert b"canary" in data
        url = picture_url(data)
        assert b"canary" not in base64.b64decode(url.partition(",")[2])
        picture = opened(url)
        assert picture.size == (32, 64) and not picture.getexif()
        assert near(picture, 16, 8, RED) and near(picture, 16, 56, BLUE)


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it is huge (PNG, section 11.2.2)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no picture of a known type"),
        (b"GIF89a", "no picture of a known type|damaged"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture of a known type"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture of a known type"),
        (b"%PDF-1.7", "no picture of a known type"),
        (drawn("PNG")[:-40], "damaged"),
        (drawn("JPEG", (300, 300))[:600], "damaged"),
        (drawn("WEBP", (300, 300))[:-30], "damaged|no picture"),
        (drawn("GIF", (300, 300))[:80], "damaged"),
        (drawn("TIFF")[:60], "damaged|no picture"),
        (bomb(PIXEL_LIMIT // 5_000, 5_001), "50,000,000 are the most"),
        (bomb(60_000, 60_000), "pixels"),
    ],
)
def test_what_is_no_whole_picture_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(PictureError, match=reason):
        picture_url(data)


@pytest.mark.filterwarnings("ignore:.*(Truncated File|Corrupt EXIF).*")
def test_every_cut_of_a_picture_is_refused_or_shown_never_an_accident() -> None:
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = drawn(kind, (16, 8))
        for end in range(0, len(whole), 3):
            with contextlib.suppress(PictureError):
                picture_url(whole[:end])


async def test_pictures_from_the_sandbox_a_data_url_and_the_web(serve, context) -> None:
    async def picture(request: web.Request) -> web.Response:
        if request.path == "/moved":
            raise web.HTTPFound("/p.png")
        return web.Response(body=drawn(), content_type="image/png")

    server = await serve({"/p.png": picture, "/moved": picture})
    looker = Looker()
    session = context(private=True, vision=looker.port)
    await session.sandbox.write("shots/one.png", drawn())
    encoded = base64.b64encode(drawn()).decode()
    sources = [
        "shots/one.png",
        f"{session.sandbox.workspace}/shots/one.png",
        f"data:image/png;base64,{encoded}",
        f"DATA:image/png;base64,{encoded[:40]}\n{encoded[40:]}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in drawn()),
        str(server.make_url("/p.png")),
        str(server.make_url("/moved")),
    ]
    for source in sources:
        answer = await vision_analyze(session, {"image_url": source, "question": "Which colours?"})
        assert answer == {"success": True, "analysis": "a red and a blue half"}, source
    assert len(looker.asked) == len(sources)
    assert all(question == "Which colours?" and near(shown, 8, 16, RED) for question, shown in looker.asked)
    assert len(session.shared_closers) == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("no/such.png", "There is no file no/such.png"),
        (".", "is a directory"),
        ("notes.txt", "no picture of a known type"),
        ("empty.png", "The picture is empty"),
        ("large.png", "larger than 20,000,000 bytes"),
        ("file:///workspace/shots/one.png", "path of a file in the sandbox"),
        ("ftp://example.org/x.png", "path of a file in the sandbox"),
        ("http://127.0.0.1:1/x.png", "not a public address"),
        ("http://169.254.169.254/x.png", "not a public address"),
        ("http://user:pw@example.org/x.png", "user name"),
        ("data:image/png;base64,####", "not valid base64"),
        ("data:image/png", "no comma"),
        ("data:,", "The picture is empty"),
        ("data:text/plain,hello", "no picture of a known type"),
    ],
)
async def test_what_is_no_picture_is_an_error_result(context, source: str, reason: str) -> None:
    looker = Looker()
    session = context(vision=looker.port)
    for name, data in (("notes.txt", b"hello"), ("empty.png", b""), ("large.png", b"\x89PNG" + bytes(20_000_000))):
        await session.sandbox.write(name, data)
    answer = await vision_analyze(session, {"image_url": source, "question": "?"})
    assert answer["success"] is False and reason in answer["error"]
    assert succeeded(answer, is_json=True)[0] is False and looker.asked == []


async def test_a_model_that_fails_says_nothing_or_is_not_there(context) -> None:
    source = f"data:;base64,{base64.b64encode(drawn()).decode()}"
    arguments = {"image_url": source, "question": "?"}
    broken = Looker(ModelError("HTTP 500 from the endpoint.", ErrorKind.TRANSIENT, status=500))
    assert await vision_analyze(context(vision=broken.port), arguments) == {
        "success": False,
        "error": "The vision model failed: HTTP 500 from the endpoint.",
    }
    assert "empty answer" in (await vision_analyze(context(vision=Looker(" \n").port), arguments))["error"]
    assert "VISION_MODEL" in (await vision_analyze(context(), arguments))["error"]


def test_the_toolset() -> None:
    (tool,) = VISION.tools
    assert tool.name == "vision_analyze" and VISION.missing({}) == ""
    assert tool.access({"image_url": "shots/one.png"}).path == ("sandbox", "shots/one.png")
    assert tool.access({"image_url": "https://example.org/x.png"}).path == ()
    assert tool.access({"image_url": "data:image/png;base64,xx"}).path == ()


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"VISION_MODEL": "m"}, ""),
        ({"VISION_BASE_URL": "http://127.0.0.1:1/v1", "VISION_MODEL": "m"}, ""),
        ({"VISION_BASE_URL": "https://api.openai.com/v1", "VISION_MODEL": "m", "VISION_API_KEY": "k"}, ""),
        ({"VISION_BASE_URL": "https://api.openai.com/v1", "VISION_MODEL": "m"}, "needs VISION_API_KEY"),
        ({"VISION_BASE_URL": "http://127.0.0.1:1/v1"}, "needs VISION_MODEL"),
        ({"VISION_BASE_URL": "localhost:8000", "VISION_MODEL": "m"}, "must be an http or https address"),
    ],
)
def test_what_a_vision_model_elsewhere_lacks(settings: dict[str, str], missing: str) -> None:
    said = VISION.missing(settings)
    assert missing in said and bool(said) is bool(missing)
