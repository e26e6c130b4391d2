"""What an endpoint's failure means: one table from (status, body, exception) to `errors.ErrorKind`.

`classify` is the table. A 200 that carries an error is classified by the code inside it. The phrases for a conversation
that is too long are those of OpenAI, Anthropic, OpenRouter, vLLM, SGLang, llama.cpp, Gemini, Groq and Mistral.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from gristmill.errors import ErrorKind, ModelError
from gristmill.model import jsontext

SNIPPET = 300  # characters of a body that a message shows

_NO_HEADERS: Mapping[str, str] = {}

# What a code or type inside a body says where no number does.
_WORD_STATUS = {
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "resource_exhausted": 429,
    "overloaded_error": 529,
    "server_overloaded": 529,
    "timeout_error": 408,
    "api_error": 500,
    "server_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "unavailable": 503,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "billing_error": 402,
    "insufficient_quota": 402,
    "not_found_error": 404,
    "model_not_found": 404,
    "invalid_request_error": 400,
    "bad_request_error": 400,
    "badrequesterror": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "content_filter": 400,
    "content_policy_violation": 400,
}


def _words(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(phrases), re.IGNORECASE)


_RATE = _words(r"tokens per (minute|day)", r"requests per (minute|day)", r"rate.?limit", "capacity", r"\bTPM\b")
_CONTEXT = _words(
    "context_length_exceeded",
    "exceed_context_size",
    r"maximum context length",
    r"context (length|size|window).{0,40}exceed",
    r"exceed\w* (the )?(available |model'?s? |maximum )?context",
    r"longer than the (model'?s|maximum) (context|model) length",
    r"(prompt|input|request) (is )?too (long|large) for",
    r"prompt is too long",
    r"input is too long",
    r"input token count.{0,40}exceeds",
    r"exceeds? the (max|maximum) (number of )?(input )?tokens",
    r"reduce the length of (the|your) (messages|prompt|input)",
    r"too large for model with \d+ maximum context",
    r"request_too_large",
)
_CREDIT = _words(
    "insufficient_quota",
    "billing_hard_limit_reached",
    "billing_not_active",
    r"insufficient (credit|balance|funds)",
    r"credit balance is too low",
    r"requires more credits",
    r"key limit exceeded",
    r"exceeded_current_quota_error",
)
_FILTER = _words(
    "content_filter",
    "content_policy",
    "content management policy",
    "ResponsibleAIPolicyViolation",
    "data_inspection_failed",
    "flagged_input",
    r"input (was )?flagged",
    "moderation",
    "PROHIBITED_CONTENT",
    r"violat\w+ (our|the) usage polic",
)
_MODEL = _words("model_not_found", r"not a valid model", r"model .{0,100}(does not exist|not found)", r"unknown model")
_REASONING_BACK = _words(r"(reasoning_content|thinking|reasoning).{0,60}must be passed back")


class Rule(NamedTuple):
    """A row of the table: these statuses, with this in the body (None: whatever it says), mean this."""

    statuses: range | tuple[int, ...]
    body: re.Pattern[str] | None
    kind: ErrorKind


# The first row that fits decides.
TABLE: tuple[Rule, ...] = (
    Rule((402,), None, ErrorKind.CREDIT),
    Rule((400, 403, 429), _CREDIT, ErrorKind.CREDIT),
    Rule((400, 403, 422, 451), _FILTER, ErrorKind.REFUSED),
    Rule((413,), _RATE, ErrorKind.TRANSIENT),
    Rule((400, 413, 422, 500), _CONTEXT, ErrorKind.CONTEXT),
    Rule((401, 403), None, ErrorKind.AUTH),
    Rule((404, 405, 410), None, ErrorKind.NOT_FOUND),
    Rule(range(300, 400), None, ErrorKind.NOT_FOUND),
    Rule((400, 422), _MODEL, ErrorKind.NOT_FOUND),
    # 413 is what some servers say when they are out of capacity; the tries are bounded.
    Rule((408, 409, 413, 425, 429, 499), None, ErrorKind.TRANSIENT),
    Rule((501, 505), None, ErrorKind.PERMANENT),
    Rule(range(500, 600), None, ErrorKind.TRANSIENT),
    Rule(range(400, 500), None, ErrorKind.PERMANENT),
)

_MENDS = {
    ErrorKind.AUTH: "Check the API key and what it may do.",
    ErrorKind.NOT_FOUND: "Check --model and --base_url.",
    ErrorKind.CREDIT: "Top up the account, or use another key; --resume goes on from here.",
}


def classify(status: int, body: bytes | str, headers: Mapping[str, str] = _NO_HEADERS) -> ModelError:
    """The error of an answer that is not a success.

    Args:
        status: the HTTP status.
        body: the answer's body, or its beginning.
        headers: its headers, names in any case if it is a case-insensitive mapping, else in lower case.
    """
    text = body if isinstance(body, str) else body.decode("utf-8", "replace")
    data = _json_or_none(text)
    kind = next((rule.kind for rule in TABLE if status in rule.statuses and _fits(rule, text)), ErrorKind.MALFORMED)
    mend = _MENDS.get(kind, "")
    if 300 <= status < 400:
        mend = f"The endpoint redirects to {headers.get('Location', 'another place')}; give that as --base_url."
    elif _REASONING_BACK.search(text):
        mend = "The endpoint wants earlier reasoning back in a field that it did not use itself."
    return ModelError(
        f"HTTP {status}: {_summary(text, data)}",
        kind,
        status=status,
        retry_after=_retry_after(headers, data),
        mend=mend,
    )


def inner_error(answer: Any) -> ModelError | None:
    """The error that a 200, or an event of a stream, carries inside; None where there is none."""
    if not isinstance(answer, dict):
        return ModelError(f"not an answer: {_cut(str(answer))}", ErrorKind.MALFORMED, status=200)
    error = answer.get("error")
    if not error and answer.get("object") == "error":
        error = answer
    if not error:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        error = first.get("error") if isinstance(first, dict) else None
    if not error:
        return None
    found = classify(_inner_status(error), jsontext.encode({"error": error}))
    if found.status:
        return found
    return ModelError(
        f"HTTP 200 with an error inside: {_summary('', {'error': error})}",
        ErrorKind.MALFORMED,
        status=200,
        retry_after=found.retry_after,
    )


def from_exception(error: BaseException, *, seconds: float) -> ModelError:
    """The error of a request that got no whole answer. `seconds` is how long it took."""
    kind = ErrorKind.TRANSIENT
    if isinstance(error, TimeoutError):
        message = f"no answer within {seconds:.0f} s"
    elif isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        message, kind = f"the connection is not trusted: {error}", ErrorKind.PERMANENT
    elif isinstance(error, aiohttp.InvalidURL):
        message, kind = f"not a URL: {error}", ErrorKind.NOT_FOUND
    elif isinstance(error, aiohttp.ClientConnectorError):
        message = f"cannot connect to {error.host}:{error.port}: {error.strerror or error}"
    elif isinstance(error, aiohttp.ClientPayloadError):
        message, kind = f"the answer was cut: {error}", ErrorKind.MALFORMED
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        message = "the server closed the connection without an answer"
    else:
        message = f"the connection was lost: {type(error).__name__}: {error}"
    return ModelError(_cut(message), kind)


def not_an_answer(what: str, body: bytes | str, *, status: int = 200) -> ModelError:
    """The error of a success that holds no answer: HTML, broken JSON, no choices."""
    text = body if isinstance(body, str) else body.decode("utf-8", "replace")
    shown = f": {_cut(text)}" if text.strip() else ""
    return ModelError(f"HTTP {status}: {what}{shown}", ErrorKind.MALFORMED, status=status)


def scrub(error: ModelError, secret: str) -> ModelError:
    """The same error, its message without the key."""
    if len(secret) >= 4 and secret in error.message:
        error.message = error.message.replace(secret, "***")
        error.args = (error.message,)
    return error


def _fits(rule: Rule, text: str) -> bool:
    return rule.body is None or rule.body.search(text) is not None


def _inner_status(error: Any) -> int:
    if not isinstance(error, dict):
        return 0
    for name in ("code", "status", "type"):
        value = error.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 300 <= value < 600:
            return value
        if isinstance(value, str):
            if value.isdigit() and 300 <= int(value) < 600:
                return int(value)
            if value.lower() in _WORD_STATUS:
                return _WORD_STATUS[value.lower()]
    return 0


def _retry_after(headers: Mapping[str, str], data: Any) -> float | None:
    error = data.get("error") if isinstance(data, dict) else None
    error = error if isinstance(error, dict) else {}
    metadata = error.get("metadata")
    inner = metadata.get("headers") if isinstance(metadata, dict) else None
    lowered = {k.lower(): str(v) for k, v in inner.items()} if isinstance(inner, dict) else {}
    for source in (headers, lowered):
        milliseconds = _seconds(source.get("retry-after-ms", ""))
        if milliseconds is not None:
            return milliseconds / 1000
        seconds = parse_retry_after(source.get("retry-after", ""), now=_date(headers.get("Date", "")))
        if seconds is not None:
            return seconds
    # Gemini: error.details[].retryDelay = "12s".
    details = error.get("details")
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(detail.get("retryDelay"), str):
            return _seconds(detail["retryDelay"].removesuffix("s"))
    return None


def parse_retry_after(value: str, *, now: float | None = None) -> float | None:
    """Seconds of a `Retry-After` (RFC 9110 §10.2.3): a number, or an HTTP date, which is compared with the server's
    own clock where `now` gives it. None for anything else.
    """
    seconds = _seconds(value)
    if seconds is not None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    return max(0.0, until - (time.time() if now is None else now))


def _seconds(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None


def _date(value: str) -> float | None:
    if not value:
        return None
    try:
        return parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None


def _summary(text: str, data: Any) -> str:
    """The error's own sentence, with what the upstream provider said, else the beginning of the body."""
    error: Any = data
    if isinstance(data, dict):
        error = data.get("error") or data.get("detail") or data
    if isinstance(error, dict):
        parts = [str(error.get("message") or ""), str(error.get("code") or error.get("type") or "")]
        metadata = error.get("metadata")
        if isinstance(metadata, dict) and metadata.get("raw"):
            parts.append(str(metadata["raw"]))
        joined = " · ".join(part for part in parts if part)
        return _cut(joined or text or str(error))
    return _cut(error if isinstance(error, str) else text) or "empty body"


def _cut(text: str) -> str:
    line = " ".join(text[: 4 * SNIPPET].split())
    return line if len(line) <= SNIPPET else line[:SNIPPET] + "…"


def _json_or_none(text: str) -> Any:
    if text.lstrip()[:1] != "{":
        return None
    try:
        return jsontext.decode(text)
    except ValueError:
        return None
