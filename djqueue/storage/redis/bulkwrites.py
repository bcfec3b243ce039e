"""Reports of bulk writes in Redis: a hash for each, and their order in a set, of no queue."""

import json
from collections.abc import Callable
from typing import Any

from djqueue.core.clock import Clock
from djqueue.storage.bulkwrites import AGE, MOST, BulkWriteReport, BulkWriteReportPage, BulkWriteReports

from .keys import CommonKeys
from .keyspace import answers
from .records import pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script


class RedisBulkWriteReports(BulkWriteReports):
    """See `BulkWriteReports`.

    run, keys: of the storage.
    """

    def __init__(self, run: Callable[[Steps[Any]], Any], keys: CommonKeys, clock: Clock) -> None:
        super().__init__(clock)
        self._run = run
        self._keys = keys

    def get(self, write: str) -> BulkWriteReport | None:
        """See `BulkWriteReports`."""
        [found] = self._run(answers([self._read(write)]))
        return _report(found)

    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        """See `BulkWriteReports`."""
        found: BulkWriteReportPage = self._run(self._page(limit, after))
        return found

    def _page(self, limit: int, after: str | None) -> Steps[BulkWriteReportPage]:
        index, first = self._keys.key("bulk_writes"), 0
        if after is not None:
            [rank] = yield [RedisCommand((b"ZREVRANK", index, pack_text(after)))]
            if rank is None:
                # Those behind it have gone before it.
                return BulkWriteReportPage([], None)
            first = rank + 1
        [names] = yield [RedisCommand((b"ZREVRANGE", index, first, first + limit))]
        writes = [text(name) for name in names[:limit]]
        answers = (yield [self._read(write) for write in writes]) if writes else []
        reports = [report for answer in answers if (report := _report(answer)) is not None]
        return BulkWriteReportPage(reports, writes[-1] if len(names) > limit else None)

    def _swap(self, report: BulkWriteReport) -> bool:
        noted: bool = self._run(self._noted(report))
        return noted

    def _noted(self, report: BulkWriteReport) -> Steps[bool]:
        following = report.revision + 1
        arguments = [
            report.revision,
            following,
            json.dumps(report._replace(revision=following).as_json()).encode(),
            pack_text(report.write),
            report.updated_at,
            report.updated_at - AGE,
            AGE,
            MOST,
        ]
        places = [self._keys.report(report.write)]
        [[noted, gone]] = yield [
            ScriptCall(script("bulk_write"), self._keys, arguments, places, sequence=False)
        ]
        if gone:
            # Whoever dies before this: they expire.
            yield [RedisCommand((b"UNLINK", *(self._keys.report(text(write)) for write in gone)))]
        return bool(noted)

    def _read(self, write: str) -> RedisCommand:
        return RedisCommand((b"HGET", self._keys.report(write), b"report"))


def _report(found: bytes | None) -> BulkWriteReport | None:
    return None if found is None else BulkWriteReport.from_json(json.loads(found))
