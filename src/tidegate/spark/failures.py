"""Carries our own errors out of Spark's tasks: a task's exception reaches the driver as text only."""

from __future__ import annotations

import base64
import gc
import pickle
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from tidegate.errors import FixConfiguration, TidegateError

_MARK = "TIDEGATE-ERROR "
_OF_DATA = re.compile(r"\[[A-Z_.]+\] ([^\n]*?)\s*SQLSTATE: 22\w{3}")  # the class of errors that data cause
_FOUND = re.compile(_MARK + r"([A-Za-z0-9+/=]+)")
F = TypeVar("F", bound=Callable[..., Iterator[Any]])


class TaskError(RuntimeError):
    """Carries a TidegateError, pickled, in its text."""


def carrying_errors(task: F) -> F:
    """A task whose TidegateErrors can be found again by `carried`.

    Meanwhile nobody looks for cycles of garbage: a task makes none, and looking took a third of its time.
    """

    @wraps(task)
    def wrapped(*arguments: Any) -> Iterator[Any]:
        gc.disable()
        try:
            yield from task(*arguments)
        except TidegateError as error:
            packed = base64.b64encode(pickle.dumps(error)).decode()
            raise TaskError(f"{_MARK}{packed}") from None
        finally:
            gc.enable()

    return wrapped  # type: ignore[return-value]


def carried(failure: Exception) -> TidegateError | None:
    """The error that a task raised, if it was one of ours."""
    found = _FOUND.search(str(failure))
    error = pickle.loads(base64.b64decode(found.group(1))) if found else None
    return error if isinstance(error, TidegateError) else None


def of_data(failure: Exception) -> FixConfiguration | None:
    """What an expression of a view could not compute, if that is what ended the job."""
    found = _OF_DATA.search(str(failure))
    if found is None:
        return None
    return FixConfiguration(
        f"Spark cannot compute an expression of a view for a row: {found.group(1)}",
        remedy="Let the view's SQL expect such values (TRY_CAST, TRY_DIVIDE, NULLIF, CASE), or correct the row.",
    )
