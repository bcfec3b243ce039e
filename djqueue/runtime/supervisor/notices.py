"""Reports of the supervisor to the outside: notifications of systemd, and the health file."""

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from djqueue.core.overview import Finding

from .children import ChildProcess


def notify(*lines: str) -> None:
    """Send a notification to systemd, if it started this process with `Type=notify`.

    The protocol is that of sd_notify(3): one datagram with a variable on each line.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_UNIX, kind) as link:
            link.sendto("\n".join(lines).encode(), address)
    except OSError:
        # systemd is restarting, does not read, or cannot be reached from here, or no descriptor is free.
        return


def reloading() -> None:
    """Notify systemd that this process restarts itself."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1_000}")


def keep_alive() -> None:
    """Notify systemd that this process works, if its unit has `WatchdogSec`."""
    if "WATCHDOG_USEC" in os.environ and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        notify("WATCHDOG=1")


class HealthFile:
    """A JSON file with the state of the children, rewritten regularly while the supervisor works.

    A probe checks that it exists and is recent: `test -n "$(find PATH -newermt '-15 seconds')"`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(
        self,
        status: str,
        children: Sequence[ChildProcess],
        restarts: int,
        problems: Sequence[tuple[str, Finding]],
    ) -> None:
        """Replace the file, so that no reader sees a part of it. Raises OSError."""
        content = {
            "status": status,
            "pid": os.getpid(),
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "restarts": restarts,
            "problems": [
                {"process": name, "id": one.id, "text": one.text, "fix": one.hint} for name, one in problems
            ],
            "processes": [
                {"name": child.name, "pid": child.pid, "ready": child.is_ready, "memory": child.memory}
                for child in children
            ],
        }
        # Another user may be able to write to the folder, so the name is new, and no link is followed.
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}-{token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with open(descriptor, "w") as file:
                file.write(json.dumps(content, indent=2) + "\n")
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
