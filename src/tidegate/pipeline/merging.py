"""Small files of old ticks become larger ones: many small merges, few large ones, and nothing is dropped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark import SparkContext

from tidegate.catalog.contract import Catalog, HistoryFile
from tidegate.collections import history
from tidegate.crash_points import reach
from tidegate.pipeline import tasks
from tidegate.spark.jobs import Jobs

FAN_IN = 32  # the files of so many ticks, merged equally often, become one
LARGEST_BYTES = 256 << 20
LARGEST_UNPACKED_BYTES = 512 << 20  # a merge holds and sorts all of it
EVERY_TICKS = 16
KEPT_SECONDS = 300.0  # so long a reader may go on with a list of files that it has taken before a merge
UnpackedBytes = Callable[[HistoryFile], int]


def next_merge(files: Sequence[HistoryFile], unpacked: UnpackedBytes, fan_in: int) -> list[HistoryFile]:
    """The oldest files that were merged equally often, of whole ticks; none where there are too few."""
    ticks: dict[tuple[int, int], list[HistoryFile]] = {}
    for one in files:
        ticks.setdefault((one.merges, one.first), []).append(one)
    small = sorted(place for place, of_tick in ticks.items() if _share(of_tick, unpacked) < 0.5)
    for level in sorted({merges for merges, _ in small}):
        alike = [place for place in small if place[0] == level]
        if len(alike) >= fan_in:
            return _up_to_the_largest([ticks[place] for place in alike[:fan_in]], unpacked)
    return []


def _share(files: Sequence[HistoryFile], unpacked: UnpackedBytes) -> float:
    """Of what one merge may take, on the disk and in a task's memory: 1 is all of it."""
    packed_bytes, unpacked_bytes = sum(one.size_bytes for one in files), sum(map(unpacked, files))
    return max(packed_bytes / LARGEST_BYTES, unpacked_bytes / LARGEST_UNPACKED_BYTES)


def _up_to_the_largest(ticks: Sequence[Sequence[HistoryFile]], unpacked: UnpackedBytes) -> list[HistoryFile]:
    """Two ticks at least: each is smaller than half."""
    taken: list[HistoryFile] = []
    for of_tick in ticks:
        if _share([*taken, *of_tick], unpacked) > 1:
            break
        taken += sorted(of_tick, key=lambda one: one.path)
    return taken


class Merging:
    """Looks at the collections now and then; a file that was merged away is removed when nobody reads it any more."""

    def __init__(
        self,
        context: SparkContext,
        catalog: Catalog,
        state: Path,
        collections: Sequence[str],
        now: Callable[[], float] = time.time,
        fan_in: int = FAN_IN,
    ) -> None:
        self._jobs, self._catalog, self._state, self._collections = Jobs(context), catalog, state, collections
        self._now, self._fan_in = now, fan_in
        self._merged_away: list[Path] = []
        self._unpacked: dict[str, int] = {}  # of the files that are listed, by path
        self._find_unlisted()

    def after_tick(self, tick: int) -> None:
        if tick % EVERY_TICKS == 0:
            self.merge()

    def merge(self) -> None:
        """Merges until no collection has enough files of one size: a job of one task for each collection that has."""
        self._remove_merged_away()
        while chosen := [files for files in map(self._next, self._collections) if files]:
            self._merge(chosen)

    def _next(self, collection: str) -> list[HistoryFile]:
        return next_merge(self._listed(collection), self._unpacked_bytes, self._fan_in)

    def _unpacked_bytes(self, file: HistoryFile) -> int:
        if file.path not in self._unpacked:
            self._unpacked[file.path] = history.unpacked_bytes(file.path)
        return self._unpacked[file.path]

    def _listed(self, collection: str) -> list[HistoryFile]:
        return self._catalog.files(collection, -1, self._catalog.derived())

    def _merge(self, chosen: Sequence[Sequence[HistoryFile]]) -> None:
        parts = [(str(self._target(files)), tuple(one.path for one in files)) for files in chosen]
        done = self._jobs.run(parts, tasks.merge)
        reach("merged")
        sizes = {path: (rows, size_bytes) for path, rows, size_bytes in done}
        for files, (path, _) in zip(chosen, parts, strict=True):
            first, last = files[0], files[-1]
            merged = HistoryFile(first.collection, path, first.first, last.last, *sizes[path], first.merges + 1)
            self._catalog.replace(files, merged)
            self._put_away([Path(one.path) for one in files])

    def _target(self, files: Sequence[HistoryFile]) -> Path:
        first, last, merges = files[0].first, max(one.last for one in files), files[0].merges + 1
        return history.folder_of(self._state, files[0].collection) / f"{first:012d}-{last:012d}-merged-{merges}.parquet"

    def _put_away(self, paths: Sequence[Path]) -> None:
        """From now on nobody new finds them; the time stands at the files themselves, for whoever runs next."""
        for path in paths:
            os.utime(path, (self._now(), self._now()))
            self._unpacked.pop(str(path), None)
        self._merged_away += paths

    def _remove_merged_away(self) -> None:
        """A file that is listed is none of these: a merge that a crash has cut off is repeated under the same name."""
        listed = {one.path for name in self._collections for one in self._listed(name)}
        kept = []
        for path in self._merged_away:
            if str(path) in listed:
                continue
            if path.exists() and self._now() - path.stat().st_mtime < KEPT_SECONDS:
                kept.append(path)
            else:
                path.unlink(missing_ok=True)
        self._merged_away = kept

    def _find_unlisted(self) -> None:
        """What earlier runs have merged away, or left between a merge and its listing; not the tick under way."""
        derived = self._catalog.derived()
        for name in self._collections:
            listed = {Path(one.path).name for one in self._listed(name)}
            folder = history.folder_of(self._state, name)
            for path in folder.iterdir() if folder.is_dir() else ():
                begun = path.name.split("-")[0].isdigit() and int(path.name.split("-")[0]) > derived
                if path.name not in listed and not begun:
                    self._merged_away.append(path)
        self._remove_merged_away()
