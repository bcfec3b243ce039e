"""Reports of bulk writes in Redis: a hash for each, and a sorted set of all."""

import json
from collections.abc import Callable
from typing import Any

from djqueue.core.clock import Clock
from djqueue.storage.bulkwrites import (
    MAX_REPORT_AGE,
    MAX_REPORTS,
    BulkWriteReport,
    BulkWriteReportPage,
    BulkWriteReports,
)

from .keys import CommonKeys
from .keyspace import answers
from .records import pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script


class RedisBulkWriteReports(BulkWriteReports):
    """Reports of bulk writes.

    run, keys: of the storage.
    """

    def __init__(self, run: Callable[[Steps[Any]], Any], keys: CommonKeys, clock: Clock) -> None:
        super().__init__(clock)
        self._run = run
        self._keys = keys

    def get(self, write: str) -> BulkWriteReport | None:
        [found] = self._run(answers([self._read(write)]))
        return _report(found)

    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        found: BulkWriteReportPage = self._run(self._page(limit, after))
        return found

    def _page(self, limit: int, after: str | None) -> Steps[BulkWriteReportPage]:
        index, first = self._keys.key("bulk_writes"), 0
        if after is not None:
            [rank] = yield [RedisCommand((b"ZREVRANK", index, pack_text(after)))]
            if rank is None:
                # The reports after it expired before it did.
                return BulkWriteReportPage([], None)
            first = rank + 1
        [names] = yield [RedisCommand((b"ZREVRANGE", index, first, first + limit))]
        writes = [text(name) for name in names[:limit]]
        answers = (yield [self._read(write) for write in writes]) if writes else []
        reports = [report for answer in answers if (report := _report(answer)) is not None]
        return BulkWriteReportPage(reports, writes[-1] if len(names) > limit else None)

    def _swap(self, report: BulkWriteReport) -> bool:
        stored: bool = self._run(self._store(report))
        return stored

    def _store(self, report: BulkWriteReport) -> Steps[bool]:
        following = report.revision + 1
        arguments = [
            report.revision,
            following,
            json.dumps(report._replace(revision=following).as_json()).encode(),
            pack_text(report.write),
            report.updated_at,
            report.updated_at - MAX_REPORT_AGE,
            MAX_REPORT_AGE,
            MAX_REPORTS,
        ]
        keys = [self._keys.report(report.write)]
        [[stored, gone]] = yield [
            ScriptCall(script("bulk_write"), self._keys, arguments, keys, sequence=False)
        ]
        if gone:
            # If this process dies before, they expire.
            yield [RedisCommand((b"UNLINK", *(self._keys.report(text(write)) for write in gone)))]
        return bool(stored)

    def _read(self, write: str) -> RedisCommand:
        return RedisCommand((b"HGET", self._keys.report(write), b"report"))


def _report(found: bytes | None) -> BulkWriteReport | None:
    return None if found is None else BulkWriteReport.from_json(json.loads(found))
