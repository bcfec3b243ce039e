"""Reports of bulk writes."""

import sys
from typing import Any

import pytest

from djqueue.storage import bulkwrites
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import (
    DEAD_PUBLISHER_AFTER,
    DONE,
    FAILED,
    MAX_REPORT_AGE,
    PUBLISHING,
    UNFINISHED,
    BulkWriteReport,
    BulkWriteReports,
    QueueShare,
)

from .case import StorageCase

WRITE = "write"
START = 1_780_000_000_000


class BulkWritesContract(StorageCase):
    """For storages that keep reports of bulk writes. They need `advance`."""

    def test_unreported_write_has_no_report(self, storage: Storage) -> None:
        assert kept(storage).get(WRITE) is None
        assert kept(storage).page(10) == ([], None)

    def test_report_is_stored_unchanged(self, storage: Storage) -> None:
        given = report(
            shares={"q": QueueShare(3, 1, 900, 100), "{other}": QueueShare(1)},
            names=("app.näme", "other"),
            rows=4_000,
            rejected={"payload": 7},
            parts=2,
            spark="app-1",
            user="anna",
        )

        noted = kept(storage).keep(given)

        assert noted == given._replace(updated_at=noted.updated_at, revision=1)
        assert kept(storage).get(WRITE) == noted
        assert kept(storage).page(10) == ([noted], None)
        assert (noted.inserted, noted.duplicates, noted.queues) == (900, 100, ("q", "{other}"))

    def test_later_reports_update_progress_and_state(self, storage: Storage) -> None:
        kept(storage).keep(report(shares={"q": QueueShare(4)}))
        kept(storage).keep(report(shares={"q": QueueShare(4, 2, 20, 1)}, started_at=START + 50))
        kept(storage).keep(
            report(state=DONE, shares={"q": QueueShare(4, 4, 40, 2, ended=True)}, finished_at=START + 90)
        )

        found = get(storage)
        assert (found.state, found.started_at, found.finished_at) == (DONE, START, START + 90)
        assert found.total == QueueShare(4, 4, 40, 2, ended=True)

    def test_completed_report_is_not_changed(self, storage: Storage) -> None:
        done = kept(storage).keep(report(state=DONE, shares={"q": QueueShare(1, 1, 5, 0, ended=True)}))

        assert kept(storage).keep(report(state=FAILED, error="too late")) == done
        assert kept(storage).keep(report()) == done

        assert get(storage) == done

    def test_reports_of_two_publishers_are_merged(self, storage: Storage) -> None:
        kept(storage).keep(report(shares={"q": QueueShare(4, 3, 30, 0), "r": QueueShare(2)}))

        kept(storage).keep(report(shares={"q": QueueShare(4, 2, 20, 0), "r": QueueShare(2, 1, 10, 0)}))

        assert get(storage).shares == {"q": QueueShare(4, 3, 30, 0), "r": QueueShare(2, 1, 10, 0)}

    @pytest.mark.parametrize("state", [FAILED, UNFINISHED])
    def test_failed_or_unfinished_report_can_be_completed(self, storage: Storage, state: str) -> None:
        kept(storage).keep(report(state=state, error="away"))

        kept(storage).keep(report(state=DONE, shares={"q": QueueShare(1, 1, 5, 0, ended=True)}))

        assert (get(storage).state, get(storage).error) == (DONE, "")

    def test_report_error_is_one_short_line(self, storage: Storage) -> None:
        kept(storage).keep(report(state=UNFINISHED, error="a\n b\0" + "c" * 5_000))

        assert get(storage).error == "a b " + "c" * (bulkwrites.ERROR - 4)

    def test_concurrent_report_update_is_not_lost(self, storage: Storage) -> None:
        mine = kept(storage)
        there = mine.keep(report(shares={"q": QueueShare(4)}))

        assert mine._swap(there._replace(rows=1))
        assert not mine._swap(there._replace(rows=2)), "it has seen an older one"
        assert not mine._swap(report(rows=3)), "it has seen none"

        assert (get(storage).rows, get(storage).revision) == (1, 2)

    def test_reports_of_stream_batches_are_summed(self, storage: Storage) -> None:
        for version in (3, 4):
            kept(storage).add(
                report(
                    state=DONE,
                    version=version,
                    started_at=START + version,
                    shares={
                        "q": QueueShare(1, 1, 10, version, ended=True),
                        f"q{version}": QueueShare(1, 1, 1),
                    },
                    rows=15,
                    rejected={"id": 1},
                    parts=2,
                    names=("a", f"n{version}"),
                )
            )

        found = get(storage)
        assert (found.version, found.batches, found.rows, found.parts) == (4, 2, 30, 4)
        assert found.shares["q"] == QueueShare(2, 2, 20, 7, ended=True)
        assert found.queues == ("q", "q3", "q4")
        assert (found.names, dict(found.rejected), found.started_at) == (
            ("a", "n3", "n4"),
            {"id": 2},
            START + 3,
        )

    @pytest.mark.parametrize("version", [3, 2])
    def test_batch_committed_again_is_counted_once(self, storage: Storage, version: int) -> None:
        batch = report(state=DONE, version=3, shares={"q": QueueShare(1, 1, 10, 0, ended=True)}, rows=10)
        first = kept(storage).add(batch)

        assert kept(storage).add(batch._replace(version=version)) == first

        assert get(storage) == first

    def test_failed_batch_keeps_the_sums(self, storage: Storage) -> None:
        summed = kept(storage).add(
            report(state=DONE, version=3, shares={"q": QueueShare(1, 1, 10, 0)}, rows=10)
        )

        kept(storage).keep(summed._replace(state=UNFINISHED, error="away"))
        assert (get(storage).state, get(storage).error, get(storage).rows) == (UNFINISHED, "away", 10)
        kept(storage).add(report(state=DONE, version=4, shares={"q": QueueShare(1, 1, 5, 0)}, rows=5))

        assert (get(storage).state, get(storage).error, get(storage).rows) == (DONE, "", 15)

    def test_most_recently_changed_report_is_listed_first(self, storage: Storage) -> None:
        self.several(storage, 5)
        kept(storage).keep(report("w1", state=DONE))

        first = kept(storage).page(3)
        rest = kept(storage).page(3, first.next)

        assert [one.write for one in first.imports] == ["w1", "w4", "w3"]
        assert [one.write for one in rest.imports] == ["w2", "w0"]
        assert (first.next, rest.next) == ("w3", None)
        assert kept(storage).page(3, "unknown") == ([], None)

    def test_oldest_reports_are_removed_beyond_the_maximum(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules[type(kept(storage)).__module__], "MAX_REPORTS", 3)

        self.several(storage, 5)

        assert [one.write for one in kept(storage).page(10).imports] == ["w4", "w3", "w2"]
        assert kept(storage).get("w1") is None

    def test_reports_beyond_the_maximum_age_are_removed(self, storage: Storage) -> None:
        kept(storage).keep(report("old"))
        self.advance(MAX_REPORT_AGE - 1_000)
        kept(storage).keep(report("newer"))
        self.advance(2_000)

        kept(storage).keep(report("new"))

        assert [one.write for one in kept(storage).page(10).imports] == ["new", "newer"]
        assert kept(storage).get("old") is None

    def test_silent_report_is_shown_as_unfinished(self, storage: Storage) -> None:
        noted = kept(storage).keep(report())

        assert noted.state_at(noted.updated_at + DEAD_PUBLISHER_AFTER) == PUBLISHING
        assert noted.state_at(noted.updated_at + DEAD_PUBLISHER_AFTER + 1) == UNFINISHED
        assert noted._replace(state=DONE).state_at(noted.updated_at + DEAD_PUBLISHER_AFTER + 1) == DONE

    def several(self, storage: Storage, count: int) -> None:
        """Reports w0, w1, … kept one after another."""
        for number in range(count):
            kept(storage).keep(report(f"w{number}", started_at=START + number))
            self.advance(10)


def kept(storage: Storage) -> BulkWriteReports:
    """Where this storage keeps reports."""
    assert storage.capabilities.bulk_writes is not None
    return storage.capabilities.bulk_writes


def get(storage: Storage) -> BulkWriteReport:
    """Return the report of the write."""
    found = kept(storage).get(WRITE)
    assert found is not None
    return found


def report(write: str = WRITE, **said: Any) -> BulkWriteReport:
    """Return a report that has just begun, with these values."""
    return BulkWriteReport(**{"write": write, "app": "nightly", "version": 1, "started_at": START, **said})
