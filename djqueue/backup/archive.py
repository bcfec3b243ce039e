"""The data file of a backup: a gzip stream of MessagePack values.

The values are a header, the parts, and an end. A part is `[kind, queue, number of records]`, followed by its
records; the end is `["end", "", number of all records]`. `djqueue.storage.snapshots` describes the records.
"""

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import msgpack

from djqueue import codecs
from djqueue.core.errors import BackupDamagedError, BackupError, SerializationError
from djqueue.core.options import MSGPACK
from djqueue.storage import snapshots
from djqueue.storage.snapshots import DEAD, JOB, LIMITER, QUEUE, SCHEDULE, Part

from .metadata import FORMAT, BackupCounts

END = "end"
LEVEL = 6
"""Level of compression. Lower ones hardly take less time, next to reading and encoding the records."""
GZIP = 31
"""Value of zlib's `wbits` for the format of gzip, without a name and a time: equal data makes equal files."""
BUFFER = 256 * 1024
"""Bytes collected before they are compressed."""
READ_SIZE = 1024 * 1024
PART_RECORDS = 500
"""Maximum number of records in a part that is read."""
PART_BYTES = 4 * 1024 * 1024
"""Bytes of records after which a part that is read ends, too."""
SURROGATES = "surrogatepass"
"""File names in error messages may have lone surrogates."""


class OpenFile(Protocol):
    """An open file to read from."""

    def read(self, size: int = ..., /) -> bytes:
        """Return at most `size` bytes."""


class ArchiveWriter:
    """Writes parts of a snapshot to a file, and counts their records. Memory use does not grow with them."""

    def __init__(self, file: BinaryIO, version: str) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self._pack = msgpack.Packer(unicode_errors=SURROGATES).pack
        self._buffer = bytearray()
        self.size = 0
        """Bytes of the file so far."""
        self._numbers: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self.raw_size = 0
        """Bytes of the data before compression."""
        self._add({"format": FORMAT, "records": snapshots.FORMAT, "djqueue": version})

    def write(self, part: Part) -> None:
        """Write a part. Raises OSError."""
        self._add([part.kind, part.queue, len(part.records)])
        self._numbers[part.kind] += len(part.records)
        for record in part.records:
            if part.kind == JOB:
                self._jobs[record["state"]] += 1
                if record["progress"] is not None:
                    record = {**record, "progress": codecs.encode(record["progress"], MSGPACK)}
            self._add(record)

    def finish(self) -> None:
        """Write what is buffered, and the end. Raises OSError."""
        self._add([END, "", self.records])
        self._flush()
        self._write(self._compressor.flush())

    @property
    def counts(self) -> BackupCounts:
        """Numbers of records written so far."""
        return BackupCounts(
            jobs=dict(sorted(self._jobs.items())),
            dead=self._numbers[DEAD],
            queues=self._numbers[QUEUE],
            limiters=self._numbers[LIMITER],
            schedules=self._numbers[SCHEDULE],
        )

    @property
    def records(self) -> int:
        """Number of records written so far."""
        return self._numbers.total()

    @property
    def sha256(self) -> str:
        """Checksum of the file so far."""
        return self._hash.hexdigest()

    def _add(self, value: Any) -> None:
        self._buffer += self._pack(value)
        if len(self._buffer) >= BUFFER:
            self._flush()

    def _flush(self) -> None:
        self.raw_size += len(self._buffer)
        self._write(self._compressor.compress(self._buffer))
        self._buffer.clear()

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        self._file.write(data)


def read_archive(file: OpenFile, name: str) -> Iterator[Part]:
    """Yield the parts of a data file, in the order in which they were written, in pages of limited size.

    Raises:
        BackupDamagedError: The file is truncated, or is not a data file.
        BackupError: A later version of djqueue has written it.
    """
    try:
        yield from _parts(file, name)
    except (
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        ValueError,
        TypeError,
        KeyError,
        SerializationError,
    ) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from error
    except msgpack.UnpackException as error:
        raise _damaged(name, f"the data ends too early: {type(error).__name__}") from error


def _parts(file: OpenFile, name: str) -> Iterator[Part]:
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:  # type: ignore[call-overload]
        yield from _unpacked(stream, name)


def _unpacked(stream: gzip.GzipFile, name: str) -> Iterator[Part]:
    unpacker = msgpack.Unpacker(
        stream,
        read_size=READ_SIZE,
        max_buffer_size=2**31 - 1,
        strict_map_key=False,
        unicode_errors=SURROGATES,
    )
    header = unpacker.unpack()
    if header["format"] > FORMAT or header["records"] > snapshots.FORMAT:
        raise BackupError(
            f"backup {name} was written by djqueue {header['djqueue']}, whose format this one does not know: "
            "upgrade djqueue to that version or later"
        )
    total = 0
    while True:
        kind, queue, number = unpacker.unpack()
        if kind == END:
            break
        total += number
        records: list[Any] = []
        begun = unpacker.tell()
        for _ in range(number):
            record = unpacker.unpack()
            if kind == JOB and record["progress"] is not None:
                record["progress"] = codecs.decode(record["progress"], MSGPACK)
            records.append(record)
            if len(records) == PART_RECORDS or unpacker.tell() - begun >= PART_BYTES:
                yield Part(kind, queue, records)
                records, begun = [], unpacker.tell()
        if records:
            yield Part(kind, queue, records)
    if number != total:
        raise ValueError(f"expected {number} records, found {total}")
    if unpacker.read_bytes(1) or stream.read(1):
        raise ValueError("data after the end")


def _damaged(name: str, how: str) -> BackupDamagedError:
    return BackupDamagedError(f"the data of backup {name} is damaged ({how}): use another backup")
