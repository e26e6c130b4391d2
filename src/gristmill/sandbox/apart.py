"""Work that must not be held up by the caller's event loop, nor hold it up for ever: on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from gristmill.errors import SandboxError

T = TypeVar("T")


def apart(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns or raises; `SandboxError` where it takes longer, whatever becomes of it then."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise SandboxError(f"There was no answer within {seconds:g} s.")
    return results[0]
