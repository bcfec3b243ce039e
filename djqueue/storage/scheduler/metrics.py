"""Metrics in memory whose buckets are rows, too."""

from collections.abc import Mapping, Sequence

from djqueue import models
from djqueue.core.engine.metricstore import MetricStore
from djqueue.core.metrics import ALL_TIME, DEFAULT_TIERS, TIERS, Tiers, start_of
from djqueue.storage.tables.rows import BUCKET, BUCKET_KEY, bucket_row, bucket_values, raw_values

from .changes import TableChange

BucketKey = tuple[int, int, str, str]
"""(length, start, queue, name)."""
PURGE_EVERY = 60_000
"""Milliseconds between two removals of expired rows."""


class StoredMetrics(MetricStore):
    """Metrics that note which buckets have changed."""

    def __init__(self, tiers: Tiers = DEFAULT_TIERS) -> None:
        super().__init__(tiers)
        self._changed: dict[BucketKey, None] = {}
        self._gone: dict[str, None] = {}
        self._purged = 0

    def load(self, alias: str) -> None:
        """Load the rows."""
        found = models.MetricBucket.objects.using(alias).order_by("start")
        with self._lock:
            for row in raw_values(found, BUCKET):
                queue, name, tier, start = row[:4]
                if tier in self._buckets:
                    self._buckets[tier][start, queue, name] = bucket_values(row)
                if tier == ALL_TIME and name:
                    self._names.setdefault(queue, set()).add(name)

    def forget(self, queue: str) -> None:
        super().forget(queue)
        with self._lock:
            self._gone[queue] = None
            self._changed = {key: None for key in self._changed if key[2] != queue}

    def _add(self, queue: str, name: str, values: Sequence[int], now: int) -> None:
        super()._add(queue, name, values, now)
        self._changed.update({(tier, start_of(tier, now), queue, name): None for tier in TIERS})

    # Rows.

    @property
    def have_changed(self) -> bool:
        """Whether there are changes that `take` returns."""
        return bool(self._changed or self._gone)

    def take(self) -> list[TableChange]:
        """Return the changes of the table since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            gone, self._gone = self._gone, {}
            found = [
                bucket_row((queue, name, tier, start), self._buckets[tier][start, queue, name])
                for tier, start, queue, name in changed
                if (start, queue, name) in self._buckets[tier]
            ]
        changes = (
            TableChange("delete", models.MetricBucket, (), [(name,) for name in gone], ("queue",)),
            TableChange("insert", models.MetricBucket, BUCKET, found, BUCKET_KEY),
        )
        return [change for change in changes if change.rows]

    def give_back(self, changes: Sequence[TableChange]) -> None:
        """Note changes again that could not be written."""
        with self._lock:
            for change in changes:
                if change.kind == "delete":
                    self._gone.update({name: None for (name,) in change.rows})
                else:
                    self._changed.update({(row[2], row[3], row[0], row[1]): None for row in change.rows})

    def purge(self, alias: str, now: int) -> None:
        """Delete expired rows, once a minute."""
        if now - self._purged < PURGE_EVERY:
            return
        self._purged = now
        kept: Mapping[int, int] = self._kept
        for tier, time in kept.items():
            models.MetricBucket.objects.using(alias).filter(tier=tier, start__lt=now - time).delete()
