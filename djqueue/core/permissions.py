"""Permissions of a job type: which files, hosts, variables and programs its handler may use.

Each permission is False (nothing), True (everything) or a list (only these), as in Deno. This module checks
and compares them; `djqueue.runtime.executors.sandbox` makes the kernel enforce them.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from .errors import OptionError
from .messages import shown
from .netrules import HIGHEST_PORT, IPAddress, NetRule, parse_net
from .options import check_text
from .suggest import nearest

__all__ = ["NOTHING", "PERMISSIONS", "TEMPLATES", "NetRule", "Permissions", "check_path", "parse_net"]

TEMPLATES = ("job_tmp", "MEDIA_ROOT", "STATIC_ROOT")
"""Names that a path may begin with, in braces; `Permissions.resolved` replaces them."""
LONGEST_PATH = 4_095
"""Maximum number of bytes of a path on Linux."""
TOO_WIDE = ("/", "/dev", "/etc", "/proc", "/sys")
"""Directories that would undo other permissions: environments, memory and devices of other processes."""
CLOSED = ("/proc/", "/sys/")
"""Directories that are refused with everything in them."""
TEMPLATE = re.compile(r"\{([^{}]*)\}(?=/|\Z)")
WILDCARD = re.compile(r"[*?]")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
SHOWN_ENTRIES = 5
"""Number of entries of a list that `Permissions.describe` shows."""

Entries = list[str] | tuple[str, ...] | set[str] | frozenset[str]
Paths = Entries | list[os.PathLike[str]] | tuple[os.PathLike[str], ...]
Ports = list[int] | tuple[int, ...] | set[int] | frozenset[int]


@dataclass(frozen=True, slots=True, init=False)
class Permissions:
    """Permissions of a job type. Immutable and hashable; nothing is granted by default.

    Raises OptionError if a value has the wrong type, or an entry is invalid.
    """

    read: bool | tuple[str, ...]
    """Files and directories that the handler may read, with everything below them."""
    write: bool | tuple[str, ...]
    """Files and directories that the handler may read, change, create and delete. True: all but those of the
    kernel in `/proc`, `/sys` and `/dev`.
    """
    net: bool | tuple[str, ...]
    """Hosts, addresses and UNIX sockets that the handler may connect to."""
    env: bool | tuple[str, ...]
    """Environment variables that the handler sees; `AWS_*` is all that begin with `AWS_`."""
    run: bool | tuple[str, ...]
    """Programs that the handler may start, by absolute path; they run in the same sandbox. True: those of the
    system, and all that it may read.
    """
    listen: bool | tuple[int, ...]
    """TCP ports on which the handler may accept connections; 0 is any free port."""
    db: bool | tuple[str, ...]
    """Aliases of the Django databases that the handler may use."""
    enqueue: bool | tuple[str, ...]
    """Queues into which the handler may enqueue jobs."""

    def __init__(
        self,
        *,
        read: bool | Paths = False,
        write: bool | Paths = False,
        net: bool | Entries = False,
        env: bool | Entries = False,
        run: bool | Paths = False,
        listen: bool | Ports = False,
        db: bool | Entries = False,
        enqueue: bool | Entries = False,
    ) -> None:
        for name, value in (
            ("read", _normal("read", value=read, check=_template_path)),
            ("write", _normal("write", value=write, check=_template_path)),
            ("net", _normal("net", value=net, check=_net_text)),
            ("env", _normal("env", value=env, check=_variable)),
            ("run", _normal("run", value=run, check=_program)),
            ("listen", _normal("listen", value=listen, check=_port)),
            ("db", _normal("db", value=db, check=check_text)),
            ("enqueue", _normal("enqueue", value=enqueue, check=check_text)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def none(cls) -> "Permissions":
        """Return the permissions that grant nothing."""
        return NOTHING

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "Permissions":
        """Return the permissions of a mapping, such as `as_dict()` or a setting.

        Raises OptionError for an unknown name.
        """
        for name in given:
            if name not in PERMISSIONS:
                raise OptionError(f"unknown permission {shown(name)}{nearest(str(name), PERMISSIONS)}")
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Return the granted permissions as plain values: True or a list for each name."""
        granted = {name: getattr(self, name) for name in PERMISSIONS}
        return {
            name: value if value is True else list(value)
            for name, value in granted.items()
            if value is not False
        }

    def resolved(self, values: Mapping[str, str]) -> "Permissions":
        """Return these permissions with the templates of their paths replaced.

        Args:
            values: Absolute path by name of the template, for example `{"job_tmp": "/tmp/x"}`.

        Raises OptionError if a template has no value, or a path is refused after the replacement.
        """
        return _replaced(
            self,
            read=_resolve("read", self.read, values),
            write=_resolve("write", self.write, values),
        )

    def with_net(self, *entries: str) -> "Permissions":
        """Return these permissions with further entries in `net`, for example a database server's."""
        if self.net is True or not entries:
            return self
        return _replaced(self, net=[*(self.net or ()), *entries])

    @property
    def templates(self) -> frozenset[str]:
        """Names of the templates that the paths contain."""
        paths = (*_entries(self.read), *_entries(self.write))
        return frozenset(found[1] for path in paths if (found := TEMPLATE.match(path)) is not None)

    @property
    def net_rules(self) -> tuple[NetRule, ...]:
        """Rules of the entries of `net`; empty if it is True or False."""
        return tuple(parse_net(text) for text in _entries(self.net))

    def allows_net(self, host: str | IPAddress, port: int) -> bool:
        """Return whether `net` lists a host name or an address, and a port."""
        return self.net is True or any(rule.matches(host, port) for rule in self.net_rules)

    def allows_socket(self, path: str) -> bool:
        """Return whether `net` lists the path of a UNIX socket."""
        return self.net is True or any(rule.matches_path(path) for rule in self.net_rules)

    def allows_env(self, name: str) -> bool:
        """Return whether `env` lists a variable."""
        return self.env is True or any(_covers(entry, name) for entry in _entries(self.env))

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an environment that `env` lists."""
        return {name: value for name, value in variables.items() if self.allows_env(name)}

    def allows_db(self, alias: str) -> bool:
        """Return whether `db` lists the alias of a database."""
        return self.db is True or alias in _entries(self.db)

    def check_databases(self, known: Iterable[str]) -> None:
        """Raise OptionError if `db` lists an alias that is not among the known ones."""
        aliases = list(known)
        for alias in _entries(self.db):
            if alias not in aliases:
                hint = nearest(alias, aliases) or f", which has: {', '.join(aliases) or 'nothing'}"
                raise OptionError(f"db: {shown(alias)} is not in DATABASES{hint}")

    def allows_enqueue(self, queue: str) -> bool:
        """Return whether `enqueue` lists a queue."""
        return self.enqueue is True or queue in _entries(self.enqueue)

    def describe(self) -> str:
        """Return the granted permissions in one line, for logs."""
        parts = [
            f"{name}=all" if value is True else f"{name}=[{_shortened(value)}]"
            for name in PERMISSIONS
            if (value := getattr(self, name)) is not False
        ]
        return ", ".join(parts) or "nothing"


PERMISSIONS = tuple(item.name for item in fields(Permissions))
"""Names of the permissions."""


def check_path(name: str, value: Any) -> str:
    """Return an absolute path in its normal form.

    Raises OptionError, naming the permission, for relative paths and for those that would undo other
    permissions, such as `/` and `/proc`.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise OptionError(f"{name}: expected an absolute path, got {shown(value)}")
    if "\0" in path:
        raise OptionError(f"{name}: {shown(path)} must not contain the NUL character")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise OptionError(f"{name}: {shown(path)} is not valid Unicode") from None
    if size > LONGEST_PATH:
        raise OptionError(f"{name}: {shown(path)} is longer than {LONGEST_PATH:,} bytes")
    if not path.startswith("/"):
        raise OptionError(f"{name}: {shown(path)} must be an absolute path")
    if ".." in path.split("/"):
        raise OptionError(f"{name}: {shown(path)} must not contain '..'")
    # PurePosixPath keeps two leading slashes, which POSIX lets a system interpret.
    normal = str(PurePosixPath("/" + path.lstrip("/")))
    if normal in TOO_WIDE or normal.startswith(CLOSED):
        raise OptionError(f"{name}: {shown(path)} can't be listed, because it would undo other permissions")
    return normal


def _normal(name: str, *, value: Any, check: Callable[[str, Any], Any]) -> bool | tuple[Any, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionError(f"{name}: expected True, False or a list, got {shown(value)}")
    # An empty list grants nothing, and must equal False.
    return tuple(sorted({check(name, entry) for entry in value})) or False


def _template_path(name: str, value: Any) -> str:
    """Return a path that may begin with a template."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and (wildcard := WILDCARD.search(text)) is not None:
        directory = text[: wildcard.start()].rpartition("/")[0]
        advice = f"name the directory {shown(directory)}" if directory else "name a directory"
        raise OptionError(f"{name}: {shown(text)} is a pattern; {advice}, which includes everything below it")
    if not isinstance(value, str) or not value.startswith("{"):
        path = check_path(name, value)
        if "{" in path:
            raise OptionError(f"{name}: {shown(value)} may contain a template only at its beginning")
        return path
    found = TEMPLATE.match(value)
    if found is None or found[1] not in TEMPLATES or "{" in value[found.end() :]:
        known = ", ".join(f"{{{one}}}" for one in TEMPLATES)
        raise OptionError(f"{name}: {shown(value)} must begin with / or with one of {known}")
    # The rest is checked as a path of its own; the template alone stands for its directory.
    rest = value[found.end() :].strip("/")
    return f"{found[0]}{check_path(name, f'/x/{rest}').removeprefix('/x')}"


def _program(name: str, value: Any) -> str:
    path = check_path(name, value)
    if WILDCARD.search(path) is not None:
        raise OptionError(f"{name}: {shown(path)} is a pattern; name each program")
    return path


def _net_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name}: expected a list of strings, got {shown(value)}")
    return parse_net(value).text


def _variable(name: str, value: Any) -> str:
    if not isinstance(value, str) or VARIABLE.fullmatch(value) is None:
        raise OptionError(f"{name}: {shown(value)} is not the name of an environment variable")
    return value


def _port(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= HIGHEST_PORT:
        raise OptionError(
            f"{name}: a port must be a whole number from 0 to {HIGHEST_PORT}; got {shown(value)}"
        )
    return value


def _resolve(name: str, granted: bool | tuple[str, ...], values: Mapping[str, str]) -> bool | tuple[str, ...]:
    if isinstance(granted, bool):
        return granted
    return tuple(_resolve_path(name, path, values) for path in granted)


def _resolve_path(name: str, path: str, values: Mapping[str, str]) -> str:
    found = TEMPLATE.match(path)
    if found is None:
        return path
    if not values.get(found[1]):
        raise OptionError(f"{name}: {found[0]} has no value here")
    # Checked before the rest is appended: `/` must not become a harmless `/cache`.
    return check_path(name, check_path(name, values[found[1]]) + path[found.end() :])


def _replaced(permissions: Permissions, **changes: Any) -> Permissions:
    return Permissions(**{**{name: getattr(permissions, name) for name in PERMISSIONS}, **changes})


def _entries(granted: bool | tuple[str, ...]) -> tuple[str, ...]:
    return () if isinstance(granted, bool) else granted


def _covers(entry: str, name: str) -> bool:
    return name.startswith(entry[:-1]) if entry.endswith("*") else name == entry


def _shortened(entries: Iterable[Any]) -> str:
    texts = [str(entry) for entry in entries]
    more = len(texts) - SHOWN_ENTRIES
    return ", ".join(texts[:SHOWN_ENTRIES]) + (f" and {more} more" if more > 0 else "")


NOTHING = Permissions()
"""The permissions that grant nothing."""
