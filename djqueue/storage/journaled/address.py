"""Parse and choose the address of the scheduler's socket."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from django.db import connections

from djqueue.core.errors import ConfigurationError


class Address(NamedTuple):
    """A Unix domain socket's path, or a TCP host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}" if self.host else f"unix://{self.path}"


def parse_address(text: str) -> Address:
    """Parse `unix:///run/djqueue.sock` or `tcp://host:port`. Raises ConfigurationError."""
    if text.startswith("unix://") and len(text) > len("unix://"):
        return Address(path=text.removeprefix("unix://"))
    if text.startswith("tcp://"):
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        if host and port.isdecimal() and 0 <= int(port) <= 65_535:
            return Address(host=host.strip("[]"), port=int(port))
    raise ConfigurationError("ADDRESS: must be like unix:///path or tcp://host:port")


def default_address(alias: str) -> Address:
    """Return the path of a socket for a database, in a directory that only this user can access."""
    settings = connections[alias].settings_dict
    name = str(settings["NAME"])
    if connections[alias].vendor == "sqlite":
        name = os.path.abspath(name)  # Other projects may use the same relative path.
    identity = "\n".join((*(str(settings.get(key, "")) for key in ("ENGINE", "HOST", "PORT")), name))
    label = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Address(path=str(Path(folder) / f"djqueue-{os.geteuid()}" / f"{label}.sock"))
