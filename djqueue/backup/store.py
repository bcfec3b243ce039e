"""The files of backups, in a storage of the setting STORAGES or in a folder.

A backup is complete when it has three files: its data, its metadata, and the checksums of both. They are
written in the order data, checksums, metadata, and deleted in the opposite order, so that a process which is
killed in between leaves files, but no backup. `leftovers` finds such files.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any, BinaryIO

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage, Storage, storages

from djqueue.conf import BackupSettings
from djqueue.core.errors import (
    BackupDamagedError,
    BackupError,
    BackupNotFoundError,
    ConfigurationError,
    DjqueueError,
)
from djqueue.core.messages import in_one_line

from .archive import NAME, Metadata, check_name, started_at

ALIAS = "djqueue_backups"
"""Key of the storage in the setting STORAGES."""
FOLDER = "djqueue_backups"
"""Name of the default folder, in BASE_DIR."""
DATA, SUMS, METADATA = ".msgpack.gz", ".sha256", ".metadata.json"
"""Endings of the names of a backup's files."""
PARTIAL = ".partial"
"""Ending of the names of files that are being written."""
CHUNK = 1024 * 1024
MAX_METADATA = 1024 * 1024
"""Maximum bytes of metadata and checksums."""


class BackupStore:
    """The backups in one file storage.

    Args:
        storage: The file storage. Only files whose names begin with that of a backup are touched.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @classmethod
    def configured(cls, settings: BackupSettings) -> "BackupStore":
        """Return the store that the settings name. Raises ConfigurationError."""
        if ALIAS in storages.backends:
            try:
                return cls(storages[ALIAS])
            except (ImproperlyConfigured, TypeError, ImportError) as error:
                raise ConfigurationError(f"STORAGES[{ALIAS!r}]: {in_one_line(error)}") from error
        return cls(
            FileSystemStorage(
                default_folder(settings), file_permissions_mode=0o600, directory_permissions_mode=0o700
            )
        )

    def describe(self) -> str:
        """Return where the backups are, as text."""
        if isinstance(self._storage, FileSystemStorage):
            return f"the folder {self._storage.location}"
        return f"STORAGES[{ALIAS!r}] ({type(self._storage).__name__})"

    # Reading.

    def names(self) -> list[str]:
        """Return the names of the complete backups, the newest first."""
        return _complete(self._files())

    def check(self, name: str) -> str:
        """Return the name of a complete backup. Raises BackupNotFoundError."""
        if check_name(name) not in self.names():
            raise BackupNotFoundError(f"there is no complete backup {name!r} in {self.describe()}")
        return name

    def latest(self) -> str:
        """Return the name of the newest backup. Raises BackupNotFoundError."""
        names = self.names()
        if not names:
            raise BackupNotFoundError(f"there is no backup in {self.describe()}")
        return names[0]

    def metadata(self, name: str) -> Metadata:
        """Read the metadata of a backup.

        Raises:
            BackupDamagedError: They are not as they were written.
        """
        data, sums = self._read(name + METADATA), self._sums(name)
        metadata = Metadata.decode(name, data)
        expected = {name + DATA: metadata.sha256, name + METADATA: hashlib.sha256(data).hexdigest()}
        if sums != expected:
            raise BackupDamagedError(
                f"backup {name} is damaged: {name}{METADATA} and {name}{SUMS} differ. Use another backup"
            )
        return metadata

    @contextmanager
    def open(self, name: str) -> "Iterator[File[bytes]]":
        """Open the data of a backup."""
        with self._named_errors():
            file = self._storage.open(name + DATA, "rb")
            file.seek(0)  # Some storages download a file when it is first used.
        with file:
            yield file

    # Writing.

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """Return a context manager over a new file for the data of a backup, in which nothing is announced.

        The file has no name, or is removed at the end, unless the process is killed first.
        """
        if not isinstance(self._storage, FileSystemStorage):
            with TemporaryFile(prefix=name + ".") as unnamed:
                yield unnamed
            return
        # In the same folder, so that the storage can rename it.
        folder = Path(self._storage.location)
        _make_folder(folder, self._storage.directory_permissions_mode)
        with NamedTemporaryFile(prefix=name + ".", suffix=PARTIAL, dir=folder, delete=False) as named:
            try:
                yield named  # type: ignore[misc]
            finally:
                Path(named.name).unlink(missing_ok=True)

    def save(self, metadata: Metadata, data: BinaryIO, check: Callable[[], None]) -> None:
        """Save a backup, and announce it last.

        Args:
            metadata: Its description.
            data: Its data, as a file of `new_file`.
            check: Called again and again; raises an exception to stop.
        """
        name = metadata.name
        described = metadata.encode()
        sums = f"{metadata.sha256}  {name}{DATA}\n{hashlib.sha256(described).hexdigest()}  {name}{METADATA}\n"
        try:
            self._save(name + DATA, data, check)
            self._save_small(name + SUMS, sums.encode(), check)
            check()
            self._save_small(name + METADATA, described, check)
        except BaseException:
            # Whatever cannot be deleted now is a leftover, which the next run deletes.
            with suppress(Exception):
                self.delete(name)
            raise

    def delete(self, name: str) -> None:
        """Delete a backup, or what there is of it."""
        self.delete_files([name + ending for ending in (METADATA, SUMS, DATA)])

    def leftovers(self) -> dict[str, list[str]]:
        """Return the files of incomplete backups, by the name of the backup."""
        files = self._files()
        complete = set(_complete(files))
        incomplete: dict[str, list[str]] = {}
        for file in files:
            match = NAME.match(file)
            # Files with other names are not ours, even if they begin with the name of a backup.
            if match is not None and file[match.end() : match.end() + 1] in (".", "_"):
                name = match[0]
                if name not in complete or file not in (name + DATA, name + SUMS, name + METADATA):
                    incomplete.setdefault(name, []).append(file)
        return incomplete

    def delete_files(self, files: list[str]) -> None:
        """Delete some files."""
        with self._named_errors():
            for file in files:
                self._storage.delete(file)

    def _files(self) -> list[str]:
        with self._named_errors():
            try:
                _, files = self._storage.listdir("")
            except FileNotFoundError:
                return []  # The folder is made for the first backup.
            except NotImplementedError:
                raise ConfigurationError(
                    f"{self.describe()} cannot list its files: use a storage with listdir() for backups"
                ) from None
        return files

    def _read(self, file: str) -> bytes:
        with self._named_errors(), self._storage.open(file, "rb") as opened:
            return bytes(opened.read(MAX_METADATA))

    def _sums(self, name: str) -> dict[str, str]:
        text = self._read(name + SUMS).decode("ascii", "replace")
        pairs = [line.partition("  ") for line in text.splitlines()]
        return {file: digest for digest, _, file in pairs}

    def _save(self, file: str, content: BinaryIO, check: Callable[[], None]) -> None:
        content.flush()
        path = content.name if isinstance(self._storage, FileSystemStorage) else None
        if path is not None:
            os.fsync(content.fileno())
        content.seek(0)
        upload: Any = MovedFile(content, path) if path is not None else CheckedFile(content, check)
        with self._named_errors():
            saved = self._storage.save(file, upload)
        if saved != file:
            self.delete_files([saved])
            raise BackupError(
                f"{self.describe()} saved the file {file!r} as {saved!r}; backups require a storage that "
                "keeps the names of new files"
            )
        if path is not None:
            _sync_folder(Path(self._storage.path(file)).parent)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert errors of the file storage, which may be of any class, to one that names it."""
        try:
            yield
        except DjqueueError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise BackupError(f"{self.describe()} cannot be used: {reason}") from error

    def _save_small(self, file: str, data: bytes, check: Callable[[], None]) -> None:
        with self.new_file(file) as content:
            content.write(data)
            self._save(file, content, check)


class MovedFile(File):  # type: ignore[type-arg]
    """A file in the folder of a storage, which renames it instead of copying it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file)
        self._path = path

    def temporary_file_path(self) -> str:
        """Return the path of the file."""
        return self._path


class CheckedFile(File):  # type: ignore[type-arg]
    """A file that can be uploaded in parts, and stops that when a check raises an exception."""

    def __init__(self, file: BinaryIO, check: Callable[[], None]) -> None:
        super().__init__(file)
        self._content = file
        self._check = check

    def read(self, size: int | None = None, /) -> bytes:
        """Read from the file."""
        self._check()
        return self._content.read(-1 if size is None else size)


def default_folder(settings: BackupSettings) -> Path:
    """Return the folder of the backups where STORAGES names none. Raises ConfigurationError."""
    if settings.folder is not None:
        return Path(settings.folder)
    base = getattr(django_settings, "BASE_DIR", None)
    if base is None:
        raise ConfigurationError(
            f"there is no place for backups: set STORAGES[{ALIAS!r}], or DJQUEUE['BACKUP']['FOLDER'] to an "
            "absolute path"
        )
    return Path(base) / FOLDER


def _make_folder(folder: Path, mode: int | None) -> None:
    """Make a folder that only this user can read, and that Git ignores. One that exists is left as it is."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o777 if mode is None else mode, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def _sync_folder(folder: Path) -> None:
    """Let the names of new files survive a power failure, on systems that can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(files: list[str]) -> list[str]:
    existing = set(files)
    names = [file.removesuffix(METADATA) for file in files if file.endswith(METADATA)]
    times = {
        name: at
        for name in names
        if {name + DATA, name + SUMS} <= existing and (at := started_at(name)) is not None
    }
    return sorted(times, key=lambda name: (times[name], name), reverse=True)
