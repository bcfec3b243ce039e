"""The format of a backup: its name, its description in JSON, and its data.

The data file is a gzip stream of MessagePack values: a header, the parts, and an end. A part is
`[kind, queue, number of records]`, followed by its records; the end is `["end", "", number of all records]`.
`djqueue.storage.snapshots` describes the records.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from types import SimpleNamespace
from typing import Any, BinaryIO, Protocol

import msgpack

from djqueue import codecs
from djqueue.conf import get_settings
from djqueue.core.errors import BackupDamagedError, BackupError, BackupNotFoundError, SerializationError
from djqueue.core.messages import shown
from djqueue.core.options import MSGPACK
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.storage import snapshots
from djqueue.storage.snapshots import DEAD, JOB, LIMITER, QUEUE, SCHEDULE, Part
from djqueue.storage.wire import has_more_values

FORMAT = 1
"""Version of the files that this version of djqueue writes. It reads all versions up to this one."""
NAME = re.compile(r"djqueue-(\d{8}T\d{9})Z-[0-9a-f]{8}")
"""Names of backups: the time of the start, in UTC with milliseconds, and random digits."""
TIME = "%Y%m%dT%H%M%S%f"
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
MAX_BESIDE = 64 * 1024 * 1024
"""Maximum bytes of a record beside the payload, result, progress and items of its job."""
MAX_VALUES = 1_000_000
"""Maximum number of values in a record. An empty list has one byte in the file and eighty in memory."""
SURROGATES = "surrogatepass"
"""File names in error messages may have lone surrogates."""


def new_name(at: int) -> str:
    """Return a name for a backup that starts now.

    Args:
        at: UTC milliseconds.
    """
    return f"djqueue-{to_datetime(at):{TIME}}"[:-3] + f"Z-{token_hex(4)}"


def started_at(name: str) -> int | None:
    """Return when a backup was started, from its name: UTC milliseconds. None if no backup has this name."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    try:
        return to_milliseconds(datetime.strptime(match[1], TIME).replace(tzinfo=UTC))
    except ValueError:
        return None


def check_name(name: str) -> str:
    """Return a name given by a user. Raises BackupNotFoundError if no backup can have it."""
    if started_at(name) is None:
        raise BackupNotFoundError(
            f"{shown(name)} is not the name of a backup; expected one such as "
            "djqueue-20261125T180000123Z-3f9a2c41: `manage.py djqueue backup list` shows them"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class BackupCounts:
    """Numbers of records in a backup."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """By state."""
    dead: int = 0
    queues: int = 0
    limiters: int = 0
    schedules: int = 0

    @property
    def all_jobs(self) -> int:
        """Number of jobs in all states."""
        return sum(self.jobs.values())

    @property
    def records(self) -> int:
        """Number of all records."""
        return self.all_jobs + self.dead + self.queues + self.limiters + self.schedules


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The description of a complete backup."""

    name: str
    format: int = FORMAT
    djqueue: str
    """Version of djqueue that took the backup."""
    storage: str
    """Kind of the storage that was backed up: the name of its class."""
    started_at: int
    """UTC milliseconds."""
    ended_at: int
    """UTC milliseconds at which all data was read."""
    counts: BackupCounts
    size: int
    """Bytes of the data file."""
    raw_size: int
    """Bytes of the data before compression."""
    sha256: str
    """Checksum of the data file."""

    def document(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        document = asdict(self)
        for key in ("started_at", "ended_at"):
            document[key] = to_datetime(document[key]).isoformat(timespec="milliseconds")
        return document

    def encode(self) -> bytes:
        """Return the JSON document."""
        return json.dumps(self.document(), indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, name: str, data: bytes) -> "Metadata":
        """Read the JSON document of a backup.

        Raises:
            BackupDamagedError: It is not such a document.
            BackupError: A later version of djqueue has written it.
        """
        try:
            document = json.loads(data)
            number = document["format"]
            if isinstance(number, int) and number > FORMAT:
                raise BackupError(
                    f"backup {name} has format {number}, and this djqueue reads formats up to {FORMAT}: "
                    f"upgrade djqueue to {document.get('djqueue', 'a later version')} or later"
                )
            if number != FORMAT or document["name"] != name:
                raise ValueError("wrong format or name")
            return cls(
                name=name,
                djqueue=_text(document["djqueue"]),
                storage=_text(document["storage"]),
                started_at=_time(document["started_at"]),
                ended_at=_time(document["ended_at"]),
                counts=_counts(document["counts"]),
                size=_count(document["size"]),
                raw_size=_count(document["raw_size"]),
                sha256=_text(document["sha256"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise BackupDamagedError(
                f"the metadata of backup {name} is damaged ({type(error).__name__}: {error}): use another one"
            ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)}")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a number, got {shown(value)}")
    return value


def _time(value: Any) -> int:
    return to_milliseconds(datetime.fromisoformat(_text(value)))


def _counts(value: Any) -> BackupCounts:
    jobs = {_text(state): _count(number) for state, number in value["jobs"].items()}
    others = {kind: _count(value[kind]) for kind in ("dead", "queues", "limiters", "schedules")}
    return BackupCounts(jobs=jobs, **others)


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
        AttributeError,
        OverflowError,
        MemoryError,
        SerializationError,
    ) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from error
    except msgpack.UnpackException as error:
        raise _damaged(name, f"the data ends too early: {type(error).__name__}") from error


def _parts(file: OpenFile, name: str) -> Iterator[Part]:
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:  # type: ignore[call-overload]
        yield from _unpacked(stream, name)


def _unpacked(stream: gzip.GzipFile, name: str) -> Iterator[Part]:
    values = _Values(stream)
    header = values.read()
    if header["format"] > FORMAT or header["records"] > snapshots.FORMAT:
        raise BackupError(
            f"backup {name} was written by djqueue {header['djqueue']}, whose format this one does not know: "
            "upgrade djqueue to that version or later"
        )
    total = 0
    while True:
        kind, queue, number = values.read()
        if kind == END:
            break
        total += number
        records: list[Any] = []
        begun = values.position
        for _ in range(number):
            record = values.read()
            if kind == JOB and record["progress"] is not None:
                _check_values(record["progress"])
                record["progress"] = codecs.decode(record["progress"], MSGPACK)
            records.append(record)
            if len(records) == PART_RECORDS or values.position - begun >= PART_BYTES:
                yield Part(kind, queue, records)
                records, begun = [], values.position
        if records:
            yield Part(kind, queue, records)
    if number != total:
        raise ValueError(f"expected {number} records, found {total}")
    if not values.is_at_end():
        raise ValueError("data after the end")


class _Values:
    """Reads one MessagePack value at a time, and checks its size before it is decoded.

    A few compressed bytes can be gigabytes of data, and a few bytes of data many objects.
    """

    def __init__(self, stream: gzip.GzipFile) -> None:
        settings = get_settings()
        self._limit = MAX_BESIDE + 3 * settings.max_payload + settings.max_items_size
        self._stream = stream
        self._held = bytearray()
        """Data from `position` on that was read already."""
        self.position = 0
        """Bytes of all values so far."""
        tape: Any = SimpleNamespace(read=self._more)
        self._unpacker = msgpack.Unpacker(tape, read_size=READ_SIZE, max_buffer_size=2**31 - 1)

    def read(self) -> Any:
        """Return the next value. Raises ValueError if it is too large."""
        self._unpacker.skip()
        size = self._unpacker.tell() - self.position
        data = bytes(self._held[:size])
        del self._held[:size]
        self.position += size
        _check_values(data)
        return msgpack.unpackb(data, unicode_errors=SURROGATES)

    def is_at_end(self) -> bool:
        """Return whether no data follows."""
        return not self._held and not self._stream.read(1)

    def _more(self, size: int) -> bytes:
        if len(self._held) > self._limit:
            raise ValueError(
                f"a record has more than {self._limit:,} bytes; raise MAX_PAYLOAD or MAX_ITEMS_SIZE if it may"
            )
        data = self._stream.read(size)
        self._held += data
        return data


def _check_values(data: bytes) -> None:
    if has_more_values(data, MAX_VALUES):
        raise ValueError(f"a record has more than {MAX_VALUES:,} values")


def _damaged(name: str, how: str) -> BackupDamagedError:
    return BackupDamagedError(f"the data of backup {name} is damaged ({how}): use another backup")
