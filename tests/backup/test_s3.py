"""Backups in S3, against a real S3 API on this machine."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from djqueue.backup import transfer
from djqueue.backup.store import ALIAS, BackupStore
from djqueue.conf import BackupSettings
from djqueue.core.errors import BackupDamagedError, BackupError
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import factories as f
from tests.clocks import AheadClock

REASON = 'not installed: pip install "moto[s3]" flask flask-cors django-storages boto3'
boto3 = pytest.importorskip("boto3", reason=REASON)
moto = pytest.importorskip("moto.server", reason=REASON)
pytest.importorskip("storages", reason=REASON)

pytestmark = [
    pytest.mark.slow,
    # Of these packages, not of djqueue.
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    found = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def bucket(server: Any, settings: Any) -> Any:
    """A bucket of a test, which STORAGES names."""
    host, port = server.get_host_and_port()
    url, name = f"http://{host}:{port}", f"backups-{uuid4().hex[:8]}"
    found = boto3.resource("s3", endpoint_url=url, **KEYS).create_bucket(Bucket=name)
    options = {
        "access_key": "test",
        "secret_key": "test",
        "region_name": "us-east-1",
        "bucket_name": name,
        "location": "djqueue/test",
        "endpoint_url": url,
        "max_memory_size": 1024 * 1024,
    }
    settings.STORAGES = {ALIAS: {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": options}}
    return found


@pytest.fixture
def s3(bucket: Any) -> BackupStore:
    return BackupStore.configured(BackupSettings())


def keys(bucket: Any) -> list[str]:
    return sorted(one.key for one in bucket.objects.all())


def test_backup_is_stored_and_restored_through_s3(
    s3: BackupStore, bucket: Any, storage: MemoryStorage, clock: AheadClock
) -> None:
    taken = transfer.take(storage, s3, clock)
    assert keys(bucket) == [
        f"djqueue/test/{taken.name}{ending}" for ending in (".metadata.json", ".msgpack.gz", ".sha256")
    ]
    assert transfer.verify(s3, taken.name) == taken
    target = MemoryStorage()
    transfer.restore(s3, taken.name, target)
    assert target.queues.names() == ["emails", "invoices"]


def test_large_backup_is_uploaded_in_parts(s3: BackupStore, clock: AheadClock) -> None:
    storage = MemoryStorage()
    for number in range(12):
        # Bytes that cannot be compressed, so that the file exceeds the 8 MiB of a single upload.
        f.enqueue(storage, queue=f"large-{number}", payload=_noise(1_000_000))
    taken = transfer.take(storage, s3, clock)
    assert taken.size > 10_000_000
    assert transfer.verify(s3, taken.name) == taken


def _noise(size: int) -> bytes:
    return b"".join(uuid4().bytes for _ in range(size // 16))


def test_oldest_backups_and_leftover_files_are_deleted_from_s3(
    s3: BackupStore, bucket: Any, storage: MemoryStorage, clock: AheadClock
) -> None:
    names = []
    for _ in range(3):
        clock.advance(1_000)
        names.append(transfer.take(storage, s3, clock).name)
    bucket.Object(f"djqueue/test/{names[1]}.metadata.json").delete()
    bucket.put_object(Key="djqueue/test/notes.txt", Body=b"x")
    transfer.prune(s3, 1, names[2], clock, is_alone=True)
    assert s3.names() == [names[2]]
    assert len(keys(bucket)) == 4


def test_flipped_bit_in_s3_object_is_detected(
    s3: BackupStore, bucket: Any, storage: MemoryStorage, clock: AheadClock
) -> None:
    taken = transfer.take(storage, s3, clock)
    data = bucket.Object(f"djqueue/test/{taken.name}.msgpack.gz")
    body = bytearray(data.get()["Body"].read())
    body[len(body) // 2] ^= 1
    data.put(Body=bytes(body))
    with pytest.raises(BackupDamagedError, match="SHA-256"):
        transfer.verify(s3, taken.name)


def test_s3_error_names_storage_and_reason(
    s3: BackupStore, bucket: Any, storage: MemoryStorage, clock: AheadClock
) -> None:
    bucket.delete()
    with pytest.raises(BackupError, match=r"STORAGES\['djqueue_backups'\] \(S3Storage\).*NoSuchBucket"):
        transfer.take(storage, s3, clock)
