"""Paths that a sandboxed process may use: the interpreter's files, those of its permissions, and programs."""

import os
import re
import site
import ssl
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache

from djqueue.core.errors import OptionError
from djqueue.core.permissions import check_path

from . import PermissionPathError, SandboxError

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
DATA = ("/usr/share/zoneinfo", "/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/ssl/openssl.cnf")
CERTIFICATES = (
    "/etc/ssl/certs",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/usr/share/ca-certificates",
)
RANDOM = ("/dev/urandom", "/dev/random")
PROGRAMS = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/local/bin", "/usr/local/sbin"),
    *(f"{prefix}/bin" for prefix in (sys.prefix, sys.base_prefix)),
)
"""Directories of programs, which a process reads if it may start every program."""
KERNEL_DIRECTORIES = frozenset({"proc", "sys", "dev"})
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that may be read and written."""
RESOLVER = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf"),
    *("/etc/services", "/etc/protocols"),
)
"""Configuration of the C library's resolver, which a process uses if it may connect to every host."""
ELF64 = b"\x7fELF\x02\x01"
"""First bytes of a little-endian 64-bit program."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
INTERPRETER = 3
"""PT_INTERP: type of the segment that names the loader."""
MAX_SEGMENTS = 128
CODE = (".py", ".pyc", ".so")
"""Endings of the files that imports read."""
SECRET = re.compile(
    r"\.|.*(secret|credential|password|passwd)|.*\.(env|pem|key|p12|pfx|jks|keystore|kdbx|gpg|asc|dump)$"
    r"|.*\.(db3?|sqlite3?)(-\w+)?$",
    re.IGNORECASE | re.DOTALL,
)
"""Names of what may hold secrets, such as `.env` and `db.sqlite3`, unless it is code."""
MOST_ENTRIES = 200_000
"""Maximum of files and directories of a project that are looked at."""
LONGEST_LINE = 256
"""Maximum number of bytes of a script's first line that the kernel reads."""


@cache
def interpreter_paths() -> tuple[str, ...]:
    """Return the existing files and directories that Python needs for imports, time zones and TLS."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    # The whole prefix may hold a project and its secrets, for example if it is the project's directory.
    paths = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64", "pyvenv.cfg")]
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), *LIBRARIES, *DATA, *CERTIFICATES, *RANDOM]
    verify = ssl.get_default_verify_paths()
    paths += [verify.openssl_cafile, verify.openssl_capath, *filter(None, (verify.cafile, verify.capath))]
    return existing(paths)


@cache
def writable_directories() -> tuple[str, ...]:
    """Return what a process may change if it may write everywhere: all but the kernel's own files.

    Through those, a job of root could reach raw disks, and make the kernel start programs outside. Cached:
    the second stage can't list the root directory.
    """
    names = sorted(set(os.listdir("/")) - KERNEL_DIRECTORIES)
    return existing([*(f"/{name}" for name in names), "/dev/shm"])  # noqa: S108 (an ordinary directory)


def existing(paths: Iterable[str]) -> tuple[str, ...]:
    """Return those paths that exist, each once."""
    return tuple(path for path in dict.fromkeys(paths) if os.path.exists(path))


def real_path(name: str, path: str, *, protected: Iterable[str]) -> str:
    """Return a path of a permission with its symbolic links followed.

    Args:
        name: Permission, for the message.
        path: Absolute path.
        protected: Directories and files that must not lie in it: code and settings.

    Raises PermissionPathError if the path does not exist or would undo other permissions.
    """
    try:
        real = os.path.realpath(path, strict=True)
    except OSError as error:
        raise PermissionPathError(f"{name}: {path} can't be granted: {error.strerror}") from error
    try:
        check_path(name, real)
    except OptionError as error:
        raise PermissionPathError(f"{name}: {path} can't be granted, because it leads to {real}") from error
    for other in protected:
        if contains(real, _real(other)):
            raise PermissionPathError(f"{name}: {path} can't be granted, because it contains {other}")
    return real


def may_be_secret(path: str) -> bool:
    """Return whether a file may hold secrets, as its name or that of the file that it leads to shows."""
    names = {os.path.basename(path), os.path.basename(os.path.realpath(path))}
    return any(not name.endswith(CODE) and SECRET.match(name) is not None for name in names)


def code_files(directory: str) -> Iterator[str]:
    """Yield the modules below a directory, besides those that the interpreter's own paths contain."""
    inside = tuple(map(os.path.realpath, interpreter_paths()))
    looked_at = 0
    seen: set[str] = set()
    left = [directory]
    while left:
        path = left.pop()
        real = os.path.realpath(path)
        if real in seen or any(contains(other, real) for other in inside):
            continue
        seen.add(real)
        for entry in _entries_of(path):
            looked_at += 1
            if looked_at > MOST_ENTRIES:
                raise SandboxError(
                    f"{directory}, from which modules are imported, has more than {MOST_ENTRIES:,} files; "
                    "move the project's code into a directory of its own"
                )
            if entry.name.endswith(CODE):
                if not may_be_secret(entry.path):
                    yield entry.path
            elif not entry.name.startswith(".") and entry.is_dir():
                left.append(entry.path)


def without_secrets(directory: str) -> list[str]:
    """Return the directory, or the parts of it that hold no file with a name like those of secrets."""
    entries = _entries_of(directory)
    secret = {entry.path for entry in entries if may_be_secret(entry.path)}
    parts: list[str] = []
    for entry in entries:
        if entry.path not in secret:
            is_directory = entry.is_dir(follow_symlinks=False)
            parts += without_secrets(entry.path) if is_directory else [entry.path]
    if not secret and len(parts) == len(entries):
        return [directory]
    return parts


def _entries_of(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        # It is not readable, so nothing can be imported from it.
        return []


def contains(directory: str, path: str) -> bool:
    """Return whether a path is a directory or lies below it. Both are absolute and without links."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def loader_of(program: str) -> str | None:
    """Return the loader of a dynamic program, or None for a static one.

    Raises PermissionPathError if the file can't be read, or is neither a 64-bit program nor a script.
    """
    try:
        with open(program, "rb") as file:
            head = file.read(HEADER.size)
            if not head.startswith(ELF64) or len(head) < HEADER.size:
                if head.startswith(b"#!"):
                    return None
                raise PermissionPathError(f"run: {program} is neither a 64-bit program nor a script")
            _, _, _, _, offset, _, _, _, size, count, *_ = HEADER.unpack(head)
            if size != SEGMENT.size or count > MAX_SEGMENTS:
                raise PermissionPathError(f"run: {program} is not a valid program")
            for index in range(count):
                file.seek(offset + index * size)
                segment = file.read(size)
                if len(segment) < size:
                    break
                kind, _, where, _, _, length, *_ = SEGMENT.unpack(segment)
                if kind == INTERPRETER:
                    file.seek(where)
                    return os.fsdecode(file.read(min(length, 4_096)).rstrip(b"\0"))
    except OSError as error:
        raise PermissionPathError(f"run: {program} can't be read: {error.strerror}") from error
    return None


def interpreter_of(program: str) -> str | None:
    """Return the interpreter that the first line of a script names, or None for a program."""
    try:
        with open(program, "rb") as file:
            line = file.read(LONGEST_LINE).split(b"\n", 1)[0]
    except OSError as error:
        raise PermissionPathError(f"run: {program} can't be read: {error.strerror}") from error
    if not line.startswith(b"#!"):
        return None
    words = line[2:].split(None, 1)
    return os.fsdecode(words[0]) if words else None


@cache
def _real(path: str) -> str:
    """Return a path of code or settings without links. Cached: every child of a template process asks."""
    return os.path.realpath(path)
