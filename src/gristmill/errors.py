"""The error tree: three families, three reactions.

```
GristmillError
├── UsageError        the user mends it before the run: one sentence, one mend, exit 2
│   └── SetupError    the machine or the endpoint is not ready: the same, exit 1
│       └── NotReady  several things are missing, told all at once
├── SessionError      recorded on its row; the run goes on
│   ├── ModelError    the endpoint failed; says which kind of failure it was
│   ├── SandboxError  the sandbox could not be started, or died
│   └── TaskError     the row's own setup failed
└── StoreError        results are at risk: the run stops at once
    ├── RunLocked     another process owns the run directory
    └── RunConflict   the directory holds another run, or other settings
```

Adapters raise plain exceptions of their libraries inside; at their edge they raise one of these.
`run/worker.work` is the one place that turns a `SessionError` into a row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any


class GristmillError(Exception):
    """Base of all errors of this package.

    Args:
        message: one sentence that says what is wrong and where.
        mend: one sentence that says what to do about it; may be empty.
    """

    exit_status = 1

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message} {self.mend}".rstrip()


class UsageError(GristmillError):
    """A flag, a file or a row that the user can mend; raised before anything is started."""

    exit_status = 2


class SetupError(UsageError):
    """Something outside the command line is missing: a file, a key, an endpoint, a program."""

    exit_status = 1


class NotReady(SetupError):
    """Several things are missing at once.

    Args:
        message: one sentence.
        problems: one line each: what cannot work, why, and its own mend.
        mend: what else one can do.
    """

    def __init__(self, message: str, problems: Sequence[str], mend: str = "") -> None:
        super().__init__(message, mend)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.message, *self.problems, self.mend)))


class ErrorKind(enum.StrEnum):
    """What an endpoint's failure means; the one vocabulary of retries, outcomes and statistics."""

    TRANSIENT = "transient"  # the same request may work later: 408, 409, 425, 429, 5xx, connection lost
    MALFORMED = "malformed"  # an answer that is not one: HTML, cut stream, no choices; retried like transient
    AUTH = "auth"  # 401, 403: the key is wrong; no request of this run can work
    NOT_FOUND = "not_found"  # unknown model or path; no request of this run can work
    CREDIT = "credit"  # 402: the account is empty
    CONTEXT = "context_overflow"  # the conversation is longer than the model's window
    REFUSED = "refused"  # content filter
    PERMANENT = "permanent"  # any other 4xx: this request will never work

    @property
    def retryable(self) -> bool:
        """True where sending the same request again is sensible."""
        return self in (ErrorKind.TRANSIENT, ErrorKind.MALFORMED)

    @property
    def fatal(self) -> bool:
        """True where every other session of the run would meet the same error."""
        return self in (ErrorKind.AUTH, ErrorKind.NOT_FOUND, ErrorKind.CREDIT)


class SessionError(GristmillError):
    """One session cannot go on; its row says so and the prompt is still owed."""


class ModelError(SessionError):
    """The endpoint failed.

    Args:
        message: what happened, with status and a bounded piece of the body; never a key.
        kind: what it means, see `ErrorKind`.
        status: HTTP status, 0 where there was none.
        retry_after: seconds the endpoint asked to wait, None where it did not.

    `attempts` holds a `model.base.Attempt` for each request that failed, filled in where they were made.
    """

    def __init__(
        self,
        message: str,
        kind: ErrorKind,
        *,
        status: int = 0,
        retry_after: float | None = None,
        mend: str = "",
    ) -> None:
        super().__init__(message, mend)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after
        self.attempts: tuple[Any, ...] = ()


class SandboxError(SessionError):
    """The sandbox could not be started, or stopped answering."""


class TaskError(SessionError):
    """The row's own `setup` command failed, or its files could not be placed."""


class StoreError(GristmillError):
    """The run directory cannot be read or written; nothing more is started."""


class RunLocked(StoreError):
    """Another process owns this run directory."""


class RunConflict(StoreError):
    """The run directory belongs to another run, or to other settings."""
