"""Small files of old ticks become larger ones: many small merges, few large ones, and nothing is dropped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark import SparkContext

from tidegate.catalog.contract import Catalog, HistoryFile
from tidegate.collections.history import folder_of
from tidegate.crash_points import reach
from tidegate.pipeline import tasks

FAN_IN = 32  # so many files of one size become one of the next
LARGEST_BYTES = 256 << 20
EVERY_TICKS = 16
KEPT_SECONDS = 120.0  # so long a reader may go on with a list of files that it has taken before a merge


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
        self._context, self._catalog, self._state, self._collections = context, catalog, state, collections
        self._now, self._fan_in = now, fan_in
        self._merged_away: list[Path] = []
        self._find_unlisted()

    def after_tick(self, tick: int) -> None:
        if tick % EVERY_TICKS == 0:
            self.merge()

    def merge(self) -> None:
        """One pass: a job of one task for each collection that has enough files of one size."""
        self._remove_merged_away()
        chosen = [files for name in self._collections if (files := self._chosen(name))]
        if not chosen:
            return
        parts = [(str(self._target(files)), tuple(one.path for one in files)) for files in chosen]
        done = self._context.parallelize(parts, len(parts)).mapPartitions(tasks.merge).collect()
        reach("merged")
        sizes = {path: (rows, size_bytes) for path, rows, size_bytes in done}
        for files, (path, _) in zip(chosen, parts, strict=True):
            rows, size_bytes = sizes[path]
            merged = HistoryFile(
                files[0].collection, path, files[0].first, files[-1].last, rows, size_bytes, files[0].merges + 1
            )
            self._catalog.replace(files, merged)
            self._put_away([Path(one.path) for one in files])

    def _chosen(self, collection: str) -> list[HistoryFile]:
        """The oldest files that were merged equally often, if there are enough, whole ticks only."""
        files = [
            one
            for one in self._catalog.files(collection, -1, self._catalog.derived())
            if one.size_bytes < LARGEST_BYTES
        ]
        for merges in sorted({one.merges for one in files}):
            alike = [one for one in files if one.merges == merges]
            if len(alike) >= self._fan_in:
                last = alike[self._fan_in - 1].last
                return sorted((one for one in alike if one.last <= last), key=lambda one: (one.first, one.path))
        return []

    def _target(self, files: Sequence[HistoryFile]) -> Path:
        first, last, merges = files[0].first, max(one.last for one in files), files[0].merges + 1
        return folder_of(self._state, files[0].collection) / f"{first:012d}-{last:012d}-merged-{merges}.parquet"

    def _put_away(self, paths: Sequence[Path]) -> None:
        """From now on nobody new finds them; the time stands at the files themselves, for whoever runs next."""
        for path in paths:
            os.utime(path, (self._now(), self._now()))
        self._merged_away += paths

    def _remove_merged_away(self) -> None:
        kept = []
        for path in self._merged_away:
            if path.exists() and self._now() - path.stat().st_mtime < KEPT_SECONDS:
                kept.append(path)
            else:
                path.unlink(missing_ok=True)
        self._merged_away = kept

    def _find_unlisted(self) -> None:
        """What earlier runs have merged away, or left between a merge and its listing; not the tick under way."""
        derived = self._catalog.derived()
        for name in self._collections:
            listed = {Path(one.path).name for one in self._catalog.files(name, -1, derived)}
            folder = folder_of(self._state, name)
            for path in folder.iterdir() if folder.is_dir() else ():
                begun = path.name.split("-")[0].isdigit() and int(path.name.split("-")[0]) > derived
                if path.name not in listed and not begun:
                    self._merged_away.append(path)
        self._remove_merged_away()
