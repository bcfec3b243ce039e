"""The folder of the scheduler's Unix socket: private to one user, checked by scheduler and clients.

The check walks down from the root. Once every folder on the way can be changed only by this user and by
root, no other user can replace a part of the path between the check and its use.
"""

import os
import pwd
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from djqueue.core.errors import ConfigurationError

MAX_LINKS = 40
"""Maximum number of symbolic links to follow, as on Linux."""
ELSEWHERE = "set DJQUEUE['STORAGE']['OPTIONS']['ADDRESS'] to a socket in a private folder of this user"
ONE_USER = (
    "run the scheduler and its clients as one user, or give the scheduler a tcp:// ADDRESS and a TOKEN in "
    "DJQUEUE['STORAGE']['OPTIONS']"
)


@contextmanager
def private_folder(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Open the folder of a socket, and check it before and after its use.

    Yields a file descriptor of the folder.

    Raises:
        ConfigurationError: It is not a real directory, belongs to another user, or is open to other users.
        FileNotFoundError: It does not exist, and `create` is False.
    """
    path = os.path.abspath(folder)
    _check_path(path, create=create)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        opened = os.fstat(descriptor)
        _check_folder(path, opened)
        yield descriptor
        if not os.path.samestat(opened, os.lstat(path)):
            raise ConfigurationError(f"ADDRESS: the folder {path} was replaced while connecting; {ELSEWHERE}")
    finally:
        os.close(descriptor)


def connect_privately(path: str, timeout: float) -> socket.socket:
    """Connect to the scheduler's Unix socket, and check who listens before anything is sent.

    Raises:
        ConfigurationError: The folder, or the listening process, is not this user's.
        OSError: Nothing listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with private_folder(Path(path).parent):
            # With a Python timeout, connecting would fail at once while the backlog is full.
            seconds, part = divmod(timeout, 1)
            limit = struct.pack("@ll", int(seconds), int(part * 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(path)
        if (uid := peer_uid(connection)) != os.geteuid():
            raise ConfigurationError(
                f"ADDRESS: the process that listens on {path} runs as {_named(uid)}, and this process as "
                f"{_named(os.geteuid())}; nothing was sent; {ONE_USER}"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def refusal_of(connection: socket.socket) -> str | None:
    """Return why the peer of an accepted connection is rejected, or None if it is accepted."""
    if (uid := peer_uid(connection)) == os.geteuid():
        return None
    return f"this process runs as {_named(uid)}, and the scheduler as {_named(os.geteuid())}; {ONE_USER}"


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket, as the kernel knows it.

    Raises OSError if the platform does not report it.
    """
    if sys.platform == "linux":
        size = struct.calcsize("iII")
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(uid)
    if sys.platform == "darwin" or sys.platform.startswith("freebsd"):
        # LOCAL_PEERCRED of SOL_LOCAL: struct xucred starts with a version and the user.
        _, uid = struct.unpack_from("II", connection.getsockopt(0, 1, 128))
        return int(uid)
    raise OSError(
        f"{sys.platform} does not report the user at the other end of a Unix socket; use a tcp:// ADDRESS"
    )


def remove_stale_socket(name: str, descriptor: int) -> None:
    """Remove an earlier scheduler's socket from an open folder. Raises FileExistsError for other files."""
    try:
        found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(f"{name} exists and is not a socket")
    os.unlink(name, dir_fd=descriptor)


def _check_path(path: str, *, create: bool) -> None:
    """Check each folder on the way to `path`, and that `path` itself is not a symbolic link."""
    parts = [part for part in path.split("/") if part]
    here, links = "/", 0
    while parts:
        part = parts.pop(0)
        is_last = not parts  # The parts of links come before the last name of `path`.
        here = os.path.normpath(os.path.join(here, part))
        found = _look(here, create=create, private=is_last)
        if not stat.S_ISLNK(found.st_mode):
            if is_last:
                _check_folder(here, found)
            else:
                _check_parent(path, here, found)
            continue
        links += 1
        if is_last:
            raise ConfigurationError(
                f"ADDRESS: the folder {here} is a symbolic link (of {_named(found.st_uid)}) and not a real "
                f"directory; remove it, or {ELSEWHERE}"
            )
        if found.st_uid not in _trusted() or links > MAX_LINKS:
            raise ConfigurationError(
                f"ADDRESS: the folder {path} is reached through {here}, a symbolic link of "
                f"{_named(found.st_uid)}; {ELSEWHERE}"
            )
        target = os.readlink(here)
        parts = [part for part in target.split("/") if part] + parts
        here = "/" if target.startswith("/") else os.path.dirname(here)


def _look(path: str, *, create: bool, private: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not create:
            raise
    try:
        os.mkdir(path, 0o700 if private else 0o755)
    except FileExistsError:
        pass  # Another process was faster; the check below rejects other users.
    return os.lstat(path)


def _check_folder(path: str, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"ADDRESS: {path} is not a directory; {ELSEWHERE}")
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"ADDRESS: the folder {path} belongs to {_named(found.st_uid)}, and this process runs as "
            f"{_named(os.geteuid())}; {ONE_USER}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o777 != 0o700:
        raise ConfigurationError(
            f"ADDRESS: the folder {path} has the mode {mode:04o} and must have 0700, which denies access "
            f"to other users; run chmod 700 {path}, or {ELSEWHERE}"
        )


def _check_parent(path: str, parent: str, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"ADDRESS: {parent} is not a directory; {ELSEWHERE}")
    if found.st_uid not in _trusted():
        raise ConfigurationError(
            f"ADDRESS: the folder {path} is in {parent}, which belongs to {_named(found.st_uid)}; this "
            f"process runs as {_named(os.geteuid())}; {ONE_USER}, or {ELSEWHERE}"
        )
    mode = stat.S_IMODE(found.st_mode)
    # In a sticky folder such as /tmp, only its owner and an entry's owner can replace the entry.
    is_open = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid()))
    if is_open and not mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"ADDRESS: the folder {path} is in {parent}, where other users can replace it (mode {mode:04o}); "
            f"run chmod go-w {parent}, or {ELSEWHERE}"
        )


def _trusted() -> tuple[int, ...]:
    """Return the users who may own folders on the way: root, this one, and the owner of /."""
    return 0, os.geteuid(), os.lstat("/").st_uid


def _named(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"the user {uid}"
