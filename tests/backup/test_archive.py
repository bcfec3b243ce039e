"""The data file of a backup: every value comes back, in memory that does not grow with the number of jobs."""

import gzip
import hashlib
import io
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from djqueue.backup import archive, transfer
from djqueue.backup.archive import PART_RECORDS, ArchiveWriter, read_archive
from djqueue.backup.store import BackupStore
from djqueue.core.errors import BackupDamagedError, BackupError, OptionError
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.snapshots import DEAD, JOB, QUEUE, SCHEDULE, Part
from djqueue.testing import factories as f
from tests.clocks import AheadClock


def archived(*parts: Part) -> io.BytesIO:
    file = io.BytesIO()
    writer = ArchiveWriter(file, "1.0")
    for part in parts:
        writer.write(part)
    writer.finish()
    file.seek(0)
    return file


def a_job(**values: Any) -> dict[str, Any]:
    return {"id": "1", "state": "waiting", "progress": None, **values}


@pytest.mark.parametrize(
    "progress", [None, 0.5, {"at": datetime(2026, 1, 2, tzinfo=UTC)}, [(1, 2), Decimal("1.10")], b"\xff"]
)
def test_archive_round_trip_preserves_values(progress: Any) -> None:
    parts = [
        Part(
            JOB,
            "e-mails: %",
            [a_job(progress=progress, payload=b"\x00\xff", name="\udcff", history=[[1, None]])],
        ),
        Part(SCHEDULE, "", [{"name": "nightly", "next_run_at": 2**60}]),
    ]
    assert list(read_archive(archived(*parts), "x")) == parts


def test_archive_round_trip_preserves_empty_data() -> None:
    assert list(read_archive(archived(), "x")) == []


def test_archive_parts_are_read_in_pages_of_limited_size() -> None:
    many = [a_job(id=str(number)) for number in range(2 * PART_RECORDS + 1)]
    large = [{"id": str(number), "error_message": "x" * 3_000_000} for number in range(3)]
    found = list(read_archive(archived(Part(JOB, "q", many), Part(DEAD, "q", large)), "x"))
    assert [len(part.records) for part in found] == [PART_RECORDS, PART_RECORDS, 1, 2, 1]
    assert [record for part in found for record in part.records] == [*many, *large]


def test_equal_data_produces_identical_archives() -> None:
    part = Part(JOB, "q", [a_job()])
    assert archived(part).getvalue() == archived(part).getvalue()


@pytest.mark.parametrize("left", [0, 5, -1, -9, -20])
def test_truncated_archive_is_detected_without_checksum(left: int) -> None:
    data = archived(Part(JOB, "q", [a_job()] * 50)).getvalue()
    with pytest.raises(BackupDamagedError, match="is damaged"):
        list(read_archive(io.BytesIO(data[:left]), "x"))


def test_archive_of_newer_format_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("djqueue.storage.snapshots.FORMAT", 99)
        file = archived()
    with pytest.raises(BackupError, match=r"written by djqueue 1\.0"):
        list(read_archive(file, "x"))


@pytest.mark.parametrize("pages", [10, pytest.param(40, marks=pytest.mark.thorough)])
def test_archive_memory_use_is_independent_of_number_of_jobs(
    store: BackupStore, clock: AheadClock, pages: int
) -> None:
    source = MemoryStorage()
    f.enqueue(source, payload=bytes(5_000))
    with source.snapshots.read() as parts:
        [record] = next(part for part in parts if part.kind == JOB).records

    @contextmanager
    def read() -> Iterator[Iterator[Part]]:
        yield (
            Part(JOB, f.QUEUE, [{**record, "id": f"{page}-{number}"} for number in range(500)])
            for page in range(pages)
        )

    storage: Any = SimpleNamespace(snapshots=SimpleNamespace(read=read))
    tracemalloc.start()
    try:
        taken = transfer.take(storage, store, clock)
        assert transfer.verify(store, taken.name).counts.jobs == {"waiting": 500 * pages}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken.raw_size > 2_500_000 * pages
    assert peak < 16_000_000


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xdd" + (3 * 10**5).to_bytes(4) + b"\x90" * 3 * 10**5, "more than 50,000 values"),
        (
            msgpack.packb({**a_job(), "progress": b"\xdd" + (3 * 10**5).to_bytes(4) + b"\x90" * 3 * 10**5}),
            "more than 50,000 values",
        ),
        (msgpack.packb({**a_job(), "payload": bytes(30 * 10**6)}), "raise MAX_PAYLOAD or MAX_ITEMS_SIZE"),
        (b"\xdd\xff\xff\xff\xff" * 400, "ends too early"),
    ],
    ids=["many values", "many values of progress", "many bytes", "false lengths"],
)
def test_small_archive_that_would_take_much_memory_is_rejected(
    record: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BESIDE", 0)
    monkeypatch.setattr(archive, "MAX_VALUES", 50_000)
    header = {"format": 1, "records": 1, "djqueue": "1.0"}
    data = gzip.compress(b"".join((msgpack.packb(header), msgpack.packb([JOB, "q", 1]), record)), 1)
    assert len(data) < 200_000

    tracemalloc.start()
    try:
        with pytest.raises(BackupDamagedError, match=reason):
            list(read_archive(io.BytesIO(data), "x"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (100_000_000 if b"payload" in record else 10_000_000)


def test_archive_counts_queue_settings(store: BackupStore, storage: MemoryStorage, clock: AheadClock) -> None:
    storage.queues.pause("emails")
    taken = transfer.take(storage, store, clock)
    with store.open(taken.name) as file:
        queues = [part.queue for part in read_archive(file, taken.name) if part.kind == QUEUE]
    assert taken.counts.queues == len(queues) == 2


@pytest.mark.parametrize(
    "values",
    [
        [[[JOB], "q", 1], {}],
        [["what", "q", 1], {}],
        [[DEAD, "q", 1], "x"],
        [[JOB, "q", 1], a_job(payload=4 * 10**12)],
    ],
)
def test_archive_with_unknown_records_is_rejected(
    store: BackupStore, clock: AheadClock, values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone has written a backup whose checksums are right."""
    header = {"format": 1, "records": 1, "djqueue": "1.0"}
    data = gzip.compress(b"".join(map(msgpack.packb, [header, *values, ["end", "", 1]])))
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveWriter, "_write", lambda self, _: None)
        patch.setattr(ArchiveWriter, "finish", lambda self: self._file.write(data))
        patch.setattr(ArchiveWriter, "size", property(lambda _: len(data), lambda *_: None), raising=False)
        patch.setattr(ArchiveWriter, "sha256", hashlib.sha256(data).hexdigest())
        name = transfer.take(MemoryStorage(), store, clock).name

    with pytest.raises(BackupDamagedError, match=f"{name} is damaged"):
        transfer.verify(store, name)
    target = MemoryStorage()
    with pytest.raises(OptionError, match="snapshot:"):
        transfer.restore(store, name, target)
    assert target.snapshots.is_empty()
