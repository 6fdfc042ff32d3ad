"""Facts: which columns of a row tell it apart from all others, and which determine which others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Columns = frozenset[str]
NOTHING: Columns = frozenset()


@dataclass(frozen=True)
class Dependency:
    """Rows that agree in `of` agree in `on` as well."""

    of: Columns
    on: Columns
    is_renaming: bool = False  # the same values under another name


@dataclass(frozen=True)
class Facts:
    """What is known of a stream's rows; columns that are no longer in the rows may still serve to conclude."""

    keys: tuple[Columns, ...] = ()  # each tells all rows apart
    dependencies: tuple[Dependency, ...] = ()

    def closure(self, columns: Iterable[str]) -> Columns:
        """All columns that these determine."""
        known = frozenset(columns)
        while True:
            more = known.union(*(one.on for one in self.dependencies if one.of <= known))
            if more == known:
                return known
            known = more

    def also_called(self, columns: Iterable[str]) -> Columns:
        """The columns under all their names."""
        return Facts(dependencies=tuple(one for one in self.dependencies if one.is_renaming)).closure(columns)

    def is_key(self, columns: Iterable[str]) -> bool:
        known = self.closure(columns)
        return any(key <= known for key in self.keys)

    def key_within(self, columns: Sequence[str], least: Sequence[str] = ()) -> tuple[str, ...] | None:
        """A smallest key among the columns, in their order; those of `least` are the first to go."""
        if not self.is_key(columns):
            return None
        last_first = list(reversed(columns))
        return self._shrunk(columns, sorted(last_first, key=lambda column: column not in least))

    def reduced(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns without those that the others determine."""
        kept = list(columns)
        for column in reversed(columns):
            rest = [one for one in kept if one != column]
            if column in self.closure(rest):
                kept = rest
        return tuple(kept)

    def _shrunk(self, columns: Sequence[str], going: Sequence[str]) -> tuple[str, ...]:
        kept = list(columns)
        for column in going:
            rest = [one for one in kept if one != column]
            if self.is_key(rest):
                kept = rest
        return tuple(kept)

    def knowing(self, *more: Dependency) -> Facts:
        return Facts(self.keys, (*self.dependencies, *more))

    def with_keys(self, *keys: Columns) -> Facts:
        return Facts(keys, self.dependencies)


def of_table(key: Iterable[str], columns: Iterable[str]) -> Facts:
    tells_apart = frozenset(key)
    return Facts((tells_apart,), (Dependency(tells_apart, frozenset(columns)),))


def joined(left: Facts, right: Facts, *more: Dependency) -> Facts:
    """Each row is a pair: a key of either side together."""
    keys = tuple(one | other for one in left.keys for other in right.keys)
    return Facts(keys, (*left.dependencies, *right.dependencies, *more))


def equal(one: str, other: str) -> tuple[Dependency, Dependency]:
    """Of a column and another that it equals; where both are NULL they are equal as well."""
    return _renaming(one, other), _renaming(other, one)


def _renaming(one: str, other: str) -> Dependency:
    return Dependency(frozenset((one,)), frozenset((other,)), is_renaming=True)


def where_present(facts: Facts, never_null: Columns) -> Facts:
    """What stays true where rows of NULLs stand in: what depends on a column that is never NULL in a real row."""
    return Facts(facts.keys, tuple(one for one in facts.dependencies if one.is_renaming or one.of & never_null))


def either(left: Facts, right: Facts, never_null: Columns) -> Facts:
    """Rows of one side, of the other, or pairs: a missing one shows in a key column that is never NULL."""
    both = joined(left, right)
    return Facts(tuple(key for key in both.keys if key & never_null), both.dependencies)


def grouped(facts: Facts, by: Sequence[str], results: Iterable[str]) -> Facts:
    """One row a group: what holds among the grouping columns still does."""
    columns = frozenset(by)
    among = (Dependency(one.of, facts.closure(one.of) & columns) for one in facts.dependencies if one.of <= columns)
    return Facts((frozenset(facts.reduced(by)),), (*among, Dependency(columns, frozenset(results))))
