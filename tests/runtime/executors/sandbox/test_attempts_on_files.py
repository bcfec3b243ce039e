"""Attempts to use files without a permission: from Python, through the C library, and by raw system calls."""

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from tests.runtime.executors.sandbox.attempts import WITHOUT, Attempt, each, needs_sandbox
from tests.runtime.executors.sandbox.harness import NOBODY, inside, libc, raw, shared_directory

pytestmark = needs_sandbox
AT_CWD = -100


@pytest.fixture
def place(user: str) -> Iterator[Path]:
    """A directory to which everything is granted or nothing, with files of the user."""
    with shared_directory() as path:
        for name in ("in", "out", "in/empty"):
            (path / name).mkdir()
        (path / "in" / "data").write_text("data")
        (path / "out" / "old").write_text("old")
        (path / "secret").write_text("secret")
        os.symlink("secret", path / "link")
        if user == "nobody":
            for one in (path, *path.rglob("*")):
                os.chown(one, NOBODY, NOBODY, follow_symlinks=False)
        yield path


def nothing(_: Path) -> Permissions:
    return NOTHING


def reading(path: Path) -> Permissions:
    return Permissions(read=[path])


def reading_in(path: Path) -> Permissions:
    return Permissions(read=[path / "in"])


def writing(path: Path) -> Permissions:
    return Permissions(write=[path])


def writing_out(path: Path) -> Permissions:
    return Permissions(read=[path / "in"], write=[path / "out"])


def everything(_: Path) -> Permissions:
    return Permissions(read=True, write=True, run=True)


def close(descriptor: int) -> None:
    os.close(descriptor)


def name(path: Path) -> bytes:
    return os.fsencode(path) + b"\0"


def secret_is_kept(path: Path) -> bool:
    return (path / "secret").read_text() == "secret"


def old_is_kept(path: Path) -> bool:
    return (path / "out" / "old").read_text() == "old" and secret_is_kept(path)


def change_to(path: Path, relative: str) -> str:
    os.chdir(path / "in")
    return (Path(relative)).read_text()


def read_through_directory(path: Path) -> bytes:
    directory = os.open(path, os.O_PATH)
    return os.read(os.open("secret", os.O_RDONLY, dir_fd=directory), 10)


def read_through_process(path: Path) -> bytes:
    descriptor = os.open(path / "secret", os.O_PATH)
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()


def sqlite_write(path: Path) -> None:
    try:
        with contextlib.closing(sqlite3.connect(path / "out" / "db.sqlite3")) as connection:
            connection.execute("CREATE TABLE one (id INTEGER)")
            connection.commit()
    except sqlite3.OperationalError as error:
        # SQLite does not say why.
        raise PermissionError(errno.EACCES, str(error)) from error


def map_file(path: Path) -> bytes:
    with open(path / "secret", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        return bytes(mapped)


def inotify(path: Path) -> None:
    watch = raw("inotify_init1", 0)
    raw("inotify_add_watch", watch, name(path), 0x100)


READS = [
    Attempt("read with open", lambda p: (p / "secret").read_text(), nothing, reading),
    Attempt("read with another directory granted", lambda p: (p / "secret").read_text(), reading_in, reading),
    Attempt("read with libc", lambda p: close(libc("open", name(p / "secret"), 0)), reading_in, reading),
    Attempt(
        "read with a raw call",
        lambda p: close(raw("openat", AT_CWD, name(p / "secret"), 0, 0)),
        nothing,
        reading,
    ),
    Attempt("read through a link", lambda p: (p / "link").read_text(), reading_in, reading),
    Attempt("read through ..", lambda p: (p / "in" / ".." / "secret").read_text(), reading_in, reading),
    Attempt("read from the working directory", lambda p: change_to(p, "../secret"), reading_in, reading),
    Attempt("read through a descriptor of the directory", read_through_directory, reading_in, reading),
    Attempt("reopen an O_PATH descriptor", read_through_process, reading_in, everything),
    Attempt("map a file", map_file, reading_in, reading),
    Attempt("list a directory", lambda p: os.listdir(p), reading_in, reading),
    Attempt(
        "list a directory with libc",
        lambda p: close(libc("open", name(p), os.O_DIRECTORY)),
        reading_in,
        reading,
    ),
    Attempt(
        "read with a write permission elsewhere", lambda p: (p / "secret").read_text(), writing_out, writing
    ),
    Attempt(
        "copy a file out", lambda p: shutil.copyfile(p / "secret", p / "out" / "x"), writing_out, writing
    ),
    Attempt("read the password file", lambda p: Path("/etc/passwd").read_text(), writing, everything),
    Attempt(
        "read the environment in /proc",
        lambda p: Path("/proc/self/environ").read_bytes(),
        writing,
        everything,
    ),
    Attempt("watch a directory", inotify, reading, everything),
    Attempt(
        "read an extended attribute",
        lambda p: os.listxattr(p / "secret"),
        reading,
        everything,
        errors=frozenset({errno.EOPNOTSUPP}),
    ),
]

WRITES = [
    Attempt("overwrite", lambda p: (p / "secret").write_text("x"), reading, writing, check=secret_is_kept),
    Attempt("append with libc", lambda p: close(libc("open", name(p / "secret"), 0o2001)), reading, writing),
    Attempt(
        "write with a raw call",
        lambda p: close(raw("openat", AT_CWD, name(p / "secret"), 2, 0)),
        reading,
        writing,
    ),
    Attempt(
        "truncate by path", lambda p: os.truncate(p / "secret", 0), reading, writing, check=secret_is_kept
    ),
    Attempt(
        "truncate with libc",
        lambda p: libc("truncate", name(p / "secret"), 0),
        reading,
        writing,
        check=secret_is_kept,
    ),
    Attempt(
        "truncate while opening for reading",
        lambda p: close(os.open(p / "secret", os.O_RDONLY | os.O_TRUNC)),
        reading,
        writing,
        check=secret_is_kept,
    ),
    Attempt(
        "create",
        lambda p: (p / "new").write_text("x"),
        writing_out,
        writing,
        check=lambda p: not (p / "new").exists(),
    ),
    Attempt("create with libc", lambda p: close(libc("creat", name(p / "new"), 0o600)), writing_out, writing),
    Attempt(
        "create a file without a name",
        lambda p: close(os.open(p, os.O_TMPFILE | os.O_RDWR)),
        writing_out,
        writing,
    ),
    Attempt("delete", lambda p: (p / "secret").unlink(), writing_out, writing, check=secret_is_kept),
    Attempt(
        "delete with a raw call",
        lambda p: raw("unlinkat", AT_CWD, name(p / "secret"), 0),
        writing_out,
        writing,
        check=secret_is_kept,
    ),
    Attempt("make a directory", lambda p: (p / "new").mkdir(), writing_out, writing),
    Attempt("remove a directory", lambda p: (p / "in" / "empty").rmdir(), writing_out, writing),
    Attempt(
        "move a file in",
        lambda p: os.rename(p / "secret", p / "out" / "x"),
        writing_out,
        writing,
        errors=frozenset({errno.EACCES, errno.EXDEV}),
        check=secret_is_kept,
    ),
    Attempt(
        "link a file in",
        lambda p: os.link(p / "secret", p / "out" / "x"),
        writing_out,
        writing,
        errors=frozenset({errno.EACCES, errno.EXDEV}),
    ),
    Attempt(
        "exchange two files",
        lambda p: raw("renameat2", AT_CWD, name(p / "secret"), AT_CWD, name(p / "out" / "old"), 2),
        writing_out,
        writing,
        errors=frozenset({errno.EACCES, errno.EXDEV}),
        check=old_is_kept,
    ),
    Attempt(
        "write through a link",
        lambda p: (p / "link").write_text("x"),
        writing_out,
        writing,
        check=secret_is_kept,
    ),
    Attempt(
        "a symbolic link for others to follow",
        lambda p: os.symlink("/etc/passwd", p / "out" / "x"),
        writing,
        everything,
    ),
    Attempt(
        "a symbolic link with a raw call",
        lambda p: raw("symlinkat", b"/etc\0", AT_CWD, name(p / "out" / "x")),
        writing,
        everything,
    ),
    Attempt("a pipe for others to open", lambda p: os.mkfifo(p / "out" / "x"), writing, everything),
    Attempt("a database", sqlite_write, reading, writing),
    Attempt(
        "change a mode with read permission only", lambda p: os.chmod(p / "secret", 0o666), reading, writing
    ),
    Attempt(
        "change times with read permission only", lambda p: os.utime(p / "secret", (1, 1)), reading, writing
    ),
    Attempt(
        "set an extended attribute",
        lambda p: os.setxattr(p / "secret", "user.x", b"1"),
        writing,
        WITHOUT,
        errors=frozenset({errno.EOPNOTSUPP}),
    ),
]


def device(path: Path) -> None:
    os.mknod(path / "out" / "x", stat.S_IFCHR | 0o600, os.makedev(1, 5))


def open_how(path: Path, mode: int) -> int:
    how = os.O_CREAT | os.O_WRONLY
    return raw(
        "openat2", AT_CWD, name(path), b"".join(one.to_bytes(8, "little") for one in (how, mode, 0)), 24
    )


def change_mode(path: Path, mode: int) -> None:
    os.chmod(path / "out" / "old", mode)


IDENTITY = [
    Attempt("set-user-ID with chmod", lambda p: change_mode(p, 0o4755), everything, WITHOUT),
    Attempt(
        "set-group-ID with libc",
        lambda p: libc("chmod", name(p / "out" / "old"), 0o2755),
        everything,
        WITHOUT,
    ),
    Attempt(
        "set-user-ID with fchmodat",
        lambda p: raw("fchmodat", AT_CWD, name(p / "out" / "old"), 0o4755),
        everything,
        WITHOUT,
    ),
    Attempt(
        "set-user-ID with a new file",
        lambda p: close(os.open(p / "out" / "x", os.O_CREAT | os.O_WRONLY, 0o4755)),
        everything,
        WITHOUT,
    ),
    Attempt(
        "set-user-ID hidden from filters",
        lambda p: close(open_how(p / "out" / "x", 0o4755)),
        everything,
        WITHOUT,
        errors=frozenset({errno.ENOSYS}),
    ),
    Attempt(
        "set-user-ID with mknod",
        lambda p: os.mknod(p / "out" / "x", stat.S_IFREG | 0o4755),
        everything,
        WITHOUT,
    ),
    Attempt("change the owner", lambda p: os.chown(p / "secret", os.getuid(), -1), everything, WITHOUT),
    Attempt(
        "change the owner with libc",
        lambda p: libc("lchown", name(p / "secret"), ctypes.c_uint(os.getuid()), ctypes.c_uint(-1)),
        everything,
        WITHOUT,
    ),
    Attempt(
        "change the owner with a raw call",
        lambda p: raw("fchownat", AT_CWD, name(p / "secret"), os.getuid(), -1, 0),
        everything,
        WITHOUT,
    ),
    Attempt("a device", device, everything, WITHOUT, works_for=("root",)),
    Attempt(
        "a file handle",
        lambda p: raw(
            "name_to_handle_at",
            AT_CWD,
            name(p / "secret"),
            (128).to_bytes(4, "little") + bytes(140),
            bytes(8),
            0,
        ),
        everything,
        WITHOUT,
        works_for=("root", "nobody", "user"),
    ),
]


KERNEL_FILES = [
    Attempt(
        f"write to {path}",
        lambda _, path=path: close(os.open(path, os.O_WRONLY)),
        everything,
        WITHOUT,
        works_for=("root",),
    )
    for path in ("/proc/sys/kernel/core_pattern", "/sys/kernel/mm/ksm/run", "/dev/kmsg", "/proc/self/mem")
    if os.path.exists(path)
]
"""Files through which root could leave the sandbox."""


@each(KERNEL_FILES)
def test_no_permission_allows_writing_to_kernel_files(attempt: Attempt[Path], place: Path, user: str) -> None:
    attempt.is_refused(place, user)


@each(KERNEL_FILES)
def test_root_can_write_to_kernel_files_outside_the_sandbox(
    attempt: Attempt[Path], place: Path, user: str
) -> None:
    attempt.works(place, user)


@each(READS)
def test_reading_files_requires_a_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    attempt.is_refused(place, user)


@each(READS)
def test_reading_files_works_with_the_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    attempt.works(place, user)


@each(WRITES)
def test_writing_files_requires_a_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    attempt.is_refused(place, user)


@each(WRITES)
def test_writing_files_works_with_the_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    attempt.works(place, user)


@each(IDENTITY)
def test_no_permission_allows_changing_owners_or_set_id_bits(
    attempt: Attempt[Path], place: Path, user: str
) -> None:
    attempt.is_refused(place, user)


@each(IDENTITY)
def test_owners_and_set_id_bits_can_be_changed_outside_the_sandbox(
    attempt: Attempt[Path], place: Path, user: str
) -> None:
    attempt.works(place, user)


@pytest.mark.parametrize("user", ["user"])
def test_file_mode_can_be_changed_with_a_write_permission(place: Path, user: str) -> None:
    assert inside(lambda: change_mode(place, 0o640), writing(place)).is_ok
    assert stat.S_IMODE((place / "out" / "old").stat().st_mode) == 0o640


@pytest.mark.parametrize("user", ["user"])
def test_path_placeholder_grants_its_directory(place: Path, user: str) -> None:
    granted = Permissions(write=["{job_tmp}"], read=["{MEDIA_ROOT}/in"])
    values = {"job_tmp": str(place / "out"), "MEDIA_ROOT": str(place)}

    def use() -> str:
        (place / "out" / "new").write_text("x")
        return (place / "in" / "data").read_text()

    assert inside(use, granted, values=values).value == "data"
    assert inside(lambda: (place / "secret").read_text(), granted, values=values).errno == errno.EACCES


@pytest.mark.parametrize("user", ["user"])
def test_recreated_directory_is_not_granted(place: Path, user: str) -> None:
    def make_anew() -> str:
        (place / "in" / "data").unlink()
        (place / "in" / "empty").rmdir()
        (place / "in").rmdir()
        (place / "in").mkdir()
        (place / "in" / "data").write_text("new")
        return (place / "in" / "data").read_text()

    granted = Permissions(write=[place / "in", place / "out"])
    result = inside(make_anew, granted)
    assert result.errno == errno.EACCES
