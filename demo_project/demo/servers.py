"""The servers of the demo: on free ports, with their data in its folder, so that all of it is one age."""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

from django.db import connections

from .children import HOST, POLL_SECONDS, STARTUP_SECONDS, Child, ChildError, Children

PROGRAMS = ("redis-server", "valkey-server")
POSTGRES_FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
)
POSTGRES_USER = "djqueue"
UNPRIVILEGED = "nobody"
"""Account that runs PostgreSQL for root, as whom it refuses to run."""


@contextmanager
def redis_in(folder: Path, port: int) -> Iterator[Child]:
    """A Redis that has what the last one of this folder had. Raises ChildError if there can be none."""
    import redis

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise ChildError(f"Neither {' nor '.join(PROGRAMS)} is installed (Debian: apt install redis-server).")
    data = folder / "redis"
    data.mkdir(parents=True, exist_ok=True)
    options = {"port": port, "bind": HOST, "dir": data, "save": "", "appendonly": "yes"}
    with alone_in(folder), Children(folder / "log") as children:
        command = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = children.run("Redis", program, *command)
        with redis.Redis(HOST, port) as client:
            wait_for_answer(port, server, client.ping, redis.ConnectionError)
        yield server


@contextmanager
def postgres_in(folder: Path, port: int) -> Iterator[Child]:
    """A PostgreSQL that has what the last one of this folder had. Raises ChildError if there can be none."""
    import psycopg

    program = shutil.which("postgres") or max(
        (path for place in POSTGRES_FOLDERS for path in glob(f"{place}/postgres")), default=None
    )
    if program is None:
        raise ChildError("PostgreSQL is not installed (Debian: apt install postgresql).")
    account = UNPRIVILEGED if os.geteuid() == 0 else None
    data = folder / "postgresql"
    with alone_in(folder), Children(folder / "log") as children:
        if not (data / "PG_VERSION").exists():
            data.mkdir(parents=True, exist_ok=True)
            if account is not None:
                shutil.chown(data, account)
                folder.chmod(0o711)
            initdb = Path(program).with_name("initdb")
            options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "-U", POSTGRES_USER, "-D", str(data)]
            made = subprocess.run([initdb, *options], user=account, cwd="/", capture_output=True, text=True)
            if made.returncode:
                raise ChildError(
                    f"initdb failed, run by the account {account or 'of this process'}: {made.stderr}"
                )
        settings = {"listen_addresses": HOST, "port": port, "unix_socket_directories": ""}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        server = children.run("PostgreSQL", program, "-D", str(data), *words, user=account)
        place = f"postgresql://{POSTGRES_USER}@{HOST}:{port}/postgres"
        wait_for_answer(port, server, lambda: psycopg.connect(place).close(), psycopg.OperationalError)
        try:
            yield server
        finally:
            connections.close_all()  # It ends when its last client has.


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two of them would write to one file."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ChildError(f"Another demo is running in {folder}: stop that demo first.") from None
    else:
        yield
    finally:
        os.close(lock)


def wait_for_answer(port: int, server: Child, ask: Callable[[], object], error: type[Exception]) -> None:
    """Ask a server until it answers: it starts, or reads its data."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        server.expect_running()
        try:
            ask()
        except error as reason:
            if time.monotonic() > deadline:
                raise server.error(f"does not answer at port {port} ({reason})") from reason
            time.sleep(POLL_SECONDS)
        else:
            return
