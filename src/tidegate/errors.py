"""Errors, sorted by what happens next. Each says what happened and carries a remedy."""

from __future__ import annotations

from typing import ClassVar


class TidegateError(Exception):
    """The root of all errors that Tidegate raises on purpose."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.remedy))


def _rebuild(kind: type[TidegateError], message: str, remedy: str) -> TidegateError:
    return kind(message, remedy=remedy)


class FixConfiguration(TidegateError):
    """Nothing was done, and nothing will be until somebody changes a setting or the source."""

    exit_code = 2


class BadRecord(FixConfiguration):
    """A record of the log cannot be taken; the message names its topic, partition and offset."""


class UnknownColumn(FixConfiguration):
    """A record has a column that its table had not when the source was asked; to ask again is the cure."""

    def __init__(self, message: str, *, remedy: str, table: str, column: str) -> None:
        super().__init__(message, remedy=remedy)
        self.table = table
        self.column = column

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_unknown_column, (self.message, self.remedy, self.table, self.column))


def _rebuild_unknown_column(message: str, remedy: str, table: str, column: str) -> UnknownColumn:
    return UnknownColumn(message, remedy=remedy, table=table, column=column)


class DefinitelyNotDone(TidegateError):
    """The action did not happen; it may be tried again."""

    exit_code = 3


class MaybeDone(TidegateError):
    """Nobody knows whether the action happened; recovery has to find out."""

    exit_code = 3


class Fenced(TidegateError):
    """Another writer has taken over; this one has written nothing since and ends."""

    exit_code = 4


class ProtocolViolation(TidegateError):
    """One side spoke out of turn: a bug, never caught."""
