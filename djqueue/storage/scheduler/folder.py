"""The private folder of the scheduler's socket, with a note of each process that has a worker.

Only this user can open the folder. Whoever could replace it, with one of its parents, cannot replace the
scheduler: each side asks the kernel for the user of the other before it reads or sends anything.
"""

import hashlib
import os
import pwd
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from django.db import connections

from djqueue.core.errors import ConfigurationError
from djqueue.core.procfs import exists, start_mark

ELSEWHERE = "set DJQUEUE['STORAGE']['OPTIONS']['FOLDER'] to a private folder of this user"
ONE_USER = "run the scheduler and its clients as one user"


def default_folder(alias: str) -> Path:
    """Return a folder for a database, in a directory that only this user can access."""
    settings = connections[alias].settings_dict
    name = str(settings["NAME"])
    if connections[alias].vendor == "sqlite":
        name = os.path.abspath(name)  # Other projects may use the same relative path.
    identity = "\n".join((*(str(settings.get(key, "")) for key in ("ENGINE", "HOST", "PORT")), name))
    label = hashlib.sha256(identity.encode()).hexdigest()[:16]
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / own_folder() / f"scheduler-{label}"


def own_folder() -> str:
    """Return the name of the folder of this user in a directory that others may share."""
    return f"djqueue-{os.geteuid()}"


class PrivateFolder:
    """A folder that only one user can open, with the socket and a file for each process with a worker."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.socket = str(self.path / "socket")

    def check(self, *, create: bool = False) -> None:
        """Check the folder.

        Raises:
            ConfigurationError: It is not a real directory, belongs to another user, or is open to others.
            FileNotFoundError: It does not exist, and `create` is False.
        """
        if self.path.parent.name == own_folder():
            # In a directory such as /tmp, where another user may have made it first.
            self._check(self.path.parent, create=create)
        self._check(self.path, create=create)

    def _check(self, path: Path, *, create: bool) -> None:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o777 != 0o700:
            raise ConfigurationError(
                f"FOLDER: {path} must be a directory, not a link, of {_named(os.geteuid())} with the "
                f"mode 0700; it belongs to {_named(found.st_uid)} and has the mode {mode:04o}; {ONE_USER}, "
                f"or {ELSEWHERE}"
            )

    def listen(self, backlog: int) -> socket.socket:
        """Return a socket that listens in the folder, in place of one of an earlier scheduler."""
        self.check(create=True)
        try:
            if not stat.S_ISSOCK(os.lstat(self.socket).st_mode):
                raise ConfigurationError(f"FOLDER: {self.socket} exists and is not a socket; {ELSEWHERE}")
            os.unlink(self.socket)
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.socket)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            raise ConfigurationError(f"FOLDER: cannot listen on {self.socket}: {error}") from error
        return listener

    @property
    def has_socket(self) -> bool:
        """Whether the folder contains the socket."""
        return os.path.lexists(self.socket)

    def connect(self, timeout: float) -> socket.socket:
        """Connect to the scheduler, and check who listens before anything is sent.

        Raises:
            ConfigurationError: The folder, or the listening process, is another user's.
            OSError: Nothing listens there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.check()
            # With a Python timeout, connecting would fail at once while the backlog is full.
            seconds, part = divmod(max(timeout, 0.001), 1)
            limit = struct.pack("@ll", int(seconds), int(part * 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(self.socket)
            if (refusal := other_user(connection)) is not None:
                raise ConfigurationError(f"FOLDER: {refusal}; nothing was sent; {ONE_USER}")
        except BaseException:
            connection.close()
            raise
        return connection

    # The processes with workers.

    def join(self, client: str) -> None:
        """Note that a process has a worker, for schedulers that start later."""
        self.check()
        (self.path / client).touch(mode=0o600)

    def leave(self, client: str) -> None:
        """Remove the note of a process."""
        (self.path / client).unlink(missing_ok=True)

    def living(self, holding: Set[str] = frozenset()) -> set[str]:
        """Return the processes with workers that are alive, and remove the notes of the others.

        Programs that clean up may have removed the notes of the processes that are `holding` claims.
        """
        names: set[str] = set()
        with suppress(FileNotFoundError):
            names.update(name for name in os.listdir(self.path) if name.count("@") == 2)
        found = {name for name in names | holding if is_alive(name)}
        for name in names - found:
            self.leave(name)
        for name in found - names:
            with suppress(OSError):
                self.join(name)
        for name in ("socket", *found):
            with suppress(FileNotFoundError):
                os.utime(self.path / name)  # Programs that clean up remove old files.
        return found


def client_name(random: str) -> str:
    """Return a name of this process: its id, its start, and a random part for each storage in it."""
    return f"{os.getpid()}{start_mark(os.getpid()) or '@'}@{random}"


def is_alive(client: str) -> bool:
    """Return whether the process with a name lives on this machine."""
    pid, started, _ = client.split("@")
    mark = f"@{started}" if started else ""
    return pid.isdecimal() and exists(int(pid), mark)


def other_user(connection: socket.socket) -> str | None:
    """Return why the process at the other end of a connection is refused; None if it has the same user."""
    if (uid := _peer_uid(connection)) == os.geteuid():
        return None
    return f"the other process runs as {_named(uid)}, and this one as {_named(os.geteuid())}"


def _peer_uid(connection: socket.socket) -> int:
    if sys.platform == "linux":
        size = struct.calcsize("iII")
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(uid)
    if sys.platform == "darwin" or sys.platform.startswith("freebsd"):
        # LOCAL_PEERCRED of SOL_LOCAL: struct xucred starts with a version and the user.
        _, uid = struct.unpack_from("II", connection.getsockopt(0, 1, 128))
        return int(uid)
    raise OSError(f"{sys.platform} does not report the user at the other end of a Unix socket")


def _named(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"the user {uid}"
