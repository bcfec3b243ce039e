"""The description of a backup: a JSON document beside its data."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from djqueue.core.errors import BackupDamagedError, BackupError, BackupNotFoundError
from djqueue.core.messages import shown
from djqueue.core.units import to_datetime, to_milliseconds

FORMAT = 1
"""Version of the files that this version of djqueue writes. It reads all versions up to this one."""
NAME = re.compile(r"djqueue-(\d{8}T\d{9})Z-[0-9a-f]{8}")
"""Names of backups: the time of the start, in UTC with milliseconds, and random digits."""
TIME = "%Y%m%dT%H%M%S%f"


def new_name(at: int) -> str:
    """Return a name for a backup that starts now.

    Args:
        at: UTC milliseconds.
    """
    return f"djqueue-{to_datetime(at):{TIME}}"[:-3] + f"Z-{token_hex(4)}"


def started_at(name: str) -> int | None:
    """Return when a backup was started, from its name: UTC milliseconds. None if no backup has this name."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    try:
        return to_milliseconds(datetime.strptime(found[1], TIME).replace(tzinfo=UTC))
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
        found = asdict(self)
        for key in ("started_at", "ended_at"):
            found[key] = to_datetime(found[key]).isoformat(timespec="milliseconds")
        return found

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
            found = document["format"]
            if isinstance(found, int) and found > FORMAT:
                raise BackupError(
                    f"backup {name} has format {found}, and this djqueue reads formats up to {FORMAT}: "
                    f"upgrade djqueue to {document.get('djqueue', 'a later version')} or later"
                )
            if found != FORMAT or document["name"] != name:
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
