"""The table of failures: what a status, a body or an exception means."""

import time
from email.utils import formatdate

import pytest

from gristmill.errors import ErrorKind, ModelError
from gristmill.model import jsontext
from gristmill.model.classify import classify, from_exception, inner_error, parse_retry_after, scrub

T, M, A, N, C, X, R, P = (
    ErrorKind.TRANSIENT,
    ErrorKind.MALFORMED,
    ErrorKind.AUTH,
    ErrorKind.NOT_FOUND,
    ErrorKind.CREDIT,
    ErrorKind.CONTEXT,
    ErrorKind.REFUSED,
    ErrorKind.PERMANENT,
)


def error(message: str, **fields: object) -> bytes:
    return jsontext.encode({"error": {"message": message, **fields}})


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (408, b"", T),
        (409, b"", T),
        (425, b"", T),
        (429, error("Rate limit reached for gpt-5 ... Limit 200000 tokens per min"), T),
        (500, b"<!DOCTYPE html><html>oops</html>", T),
        (502, error("Provider returned error"), T),
        (503, b"<html>busy</html>", T),
        (520, b"", T),
        (529, error("Overloaded", type="overloaded_error"), T),
        (413, error("Payload Too Large"), T),
        (413, error("Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 9000"), T),
        (413, error("Request exceeds the maximum size", type="request_too_large"), X),
        (401, error("Incorrect API key provided"), A),
        (403, error("Your key may not do this"), A),
        (404, error("The model `nope` does not exist", code="model_not_found"), N),
        (404, b"<html>nginx</html>", N),
        (400, error("nope/nope is not a valid model ID"), N),
        (301, b"", N),
        (402, error("Insufficient credits", code=402), C),
        (429, error("You exceeded your current quota", type="insufficient_quota", code="insufficient_quota"), C),
        (400, error("Your credit balance is too low to access the Anthropic API", type="invalid_request_error"), C),
        (403, error("Key limit exceeded (total limit)", code=403), C),
        (403, error("Your input was flagged", code=403, metadata={"reasons": ["x"], "flagged_input": "y"}), R),
        (400, error("The response was filtered by Azure OpenAI's content management policy"), R),
        (400, error("blocked", code="content_filter"), R),
        (400, error("'messages' is a required property"), P),
        (400, error("reasoning_content must be passed back"), P),
        (422, error("bad field"), P),
        (418, b"teapot", P),
        (501, b"", P),
    ],
)
def test_a_status_and_body_have_one_meaning(status: int, body: bytes, kind: ErrorKind) -> None:
    found = classify(status, body)
    assert (found.kind, found.status) == (kind, status)


@pytest.mark.parametrize(
    ("status", "message", "fields"),
    [
        (400, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens", {}),
        (400, "Please reduce the length of the messages or completion.", {"code": "context_length_exceeded"}),
        (400, "prompt is too long: 208310 tokens > 200000 maximum", {"type": "invalid_request_error"}),
        (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000", {}),
        (400, "This endpoint's maximum context length is 131072 tokens.", {"code": 400}),
        (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens).", {}),
        (400, "The decoder prompt (length 9000) is longer than the maximum model length of 8192.", {}),
        (
            400,
            "the request exceeds the available context size, try increasing it",
            {"type": "exceed_context_size_error"},
        ),
        (500, "the request exceeds the available context size. try increasing the context size", {}),
        (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", {}),
        (400, "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context", {}),
        (422, "context window exceeded", {}),
    ],
)
def test_a_conversation_that_is_too_long_is_told_apart(status: int, message: str, fields: dict[str, object]) -> None:
    assert classify(status, error(message, **fields)).kind is X


def test_the_upstream_text_inside_a_router_error_counts() -> None:
    raw = '{"error":{"message":"prompt is too long: 3 tokens > 2 maximum"}}'
    found = classify(400, error("Provider returned error", code=400, metadata={"raw": raw}))
    assert found.kind is X
    assert "prompt is too long" in found.message


def test_a_message_is_bounded_and_says_status_and_body() -> None:
    found = classify(503, b"<html>" + b"busy " * 10_000)
    assert found.message.startswith("HTTP 503: <html>busy")
    assert len(found.message) < 400
    assert classify(500, b"").message == "HTTP 500: empty body"


def test_the_key_never_shows() -> None:
    found = scrub(classify(401, error("Incorrect API key provided: sk-secret-1")), "sk-secret-1")
    assert "sk-secret-1" not in str(found) + repr(found) + str(found.args)
    assert "***" in found.message


def test_a_redirect_names_the_place() -> None:
    assert "https://elsewhere/v1" in classify(308, b"", {"Location": "https://elsewhere/v1"}).mend


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"retry-after": "7"}, b"", 7.0),
        ({"retry-after": "0.5"}, b"", 0.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, b"", 1.5),
        ({}, error("Rate limited", code=429, metadata={"headers": {"Retry-After": "1"}}), 1.0),
        ({}, error("quota", details=[{"@type": "…RetryInfo", "retryDelay": "12.5s"}]), 12.5),
        ({"retry-after": "soon"}, b"", None),
        ({"retry-after": "-3"}, b"", None),
        ({"retry-after": "nan"}, b"", None),
        ({}, b"[]", None),
    ],
)
def test_retry_after_is_found(headers: dict[str, str], body: bytes, seconds: float | None) -> None:
    assert classify(429, body, headers).retry_after == seconds


def test_retry_after_as_a_date_is_measured_by_the_server_clock() -> None:
    skewed = time.time() - 5000
    assert parse_retry_after(formatdate(skewed + 30, usegmt=True), now=float(int(skewed))) == pytest.approx(30, abs=1)
    assert parse_retry_after(formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert parse_retry_after(formatdate(time.time() - 30, usegmt=True)) == 0.0
    headers = {"retry-after": formatdate(skewed + 9, usegmt=True), "Date": formatdate(skewed, usegmt=True)}
    assert classify(429, b"", headers).retry_after == 9.0


@pytest.mark.parametrize(
    ("answer", "kind", "status"),
    [
        ({"error": {"message": "Provider returned error", "code": 502}}, T, 502),
        ({"error": {"message": "Rate limited", "code": "429"}}, T, 429),
        ({"error": {"message": "no", "code": 401}}, A, 401),
        ({"error": {"message": "no", "code": 402}}, C, 402),
        ({"error": {"message": "no", "code": 400}}, P, 400),
        ({"error": {"message": "maximum context length is 9", "code": "context_length_exceeded"}}, X, 400),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, T, 529),
        ({"error": "model is loading"}, M, 200),
        ({"error": {"message": "?"}}, M, 200),
        ({"object": "error", "message": "bad", "code": 400}, P, 400),
        ({"choices": [{"error": {"code": 503, "message": "x"}, "finish_reason": "error"}]}, T, 503),
        ([1], M, 200),
    ],
)
def test_an_error_inside_a_success_is_classified_by_its_own_code(answer: object, kind: ErrorKind, status: int) -> None:
    found = inner_error(answer)
    assert found is not None
    assert (found.kind, found.status) == (kind, status)


def test_a_good_answer_has_no_inner_error() -> None:
    assert inner_error({"choices": [{"message": {"content": "error"}}], "error": None}) is None


def test_a_timeout_says_how_long() -> None:
    found = from_exception(TimeoutError(), seconds=30.2)
    assert isinstance(found, ModelError)
    assert found.kind is T
    assert "30 s" in found.message
