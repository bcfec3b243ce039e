"""Real servers for the tests, on free loopback ports, in temporary folders.

    python -m tests.servers postgresql COMMAND...

runs a command with `DJQUEUE_TEST_DB` and `DJQUEUE_TEST_PG` naming a PostgreSQL of its own.
"""

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Self

import psycopg
import redis

from tests.support import eventually

POSTGRES_FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
)
CHROMIUM_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)

# Runs a server for as long as its standard input is open, so that none outlives the tests, however
# they end. It is a shell and no pre-exec hook, because those are unsafe beside threads.
KEEPER = """
stop=$1; shift
"$@" & server=$!
exec 3<&0
{ read -r _ <&3; kill -s "$stop" "$server"; } & wait "$server"
"""


class MissingProgramError(Exception):
    """A program that a test needs is not installed."""


class DiedAtStartError(Exception):
    """A server ended before it was ready; the message holds the end of its log."""


class Server:
    """One server process; `with` starts it and removes it with its folder. It can be stopped and
    started again in between, on the same port and with the same data."""

    stop_signal = "TERM"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="djqueue-"))
        self.port = free_port()
        self._keeper: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._keeper = keeper = subprocess.Popen(
                ["sh", "-c", KEEPER, "sh", self.stop_signal, *self.command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                **self._process_options(),
            )
        try:
            eventually(
                lambda: keeper.poll() is not None or self.is_ready(),
                timeout=60,
                message=f"{self.command()[0]} is ready",
            )
        except BaseException:
            self.stop()
            raise
        if keeper.poll() is not None:
            self.stop()
            raise DiedAtStartError((self.folder / "log").read_text(errors="replace")[-2000:])

    def stop(self) -> None:
        if keeper := self._keeper:
            self._keeper = None
            keeper.communicate(timeout=60)

    def _process_options(self) -> dict[str, object]:
        return {}

    def __enter__(self) -> Self:
        try:
            try:
                self.start()
            except DiedAtStartError:  # somebody else may have taken the port meanwhile
                self.port = free_port()
                self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgresServer(Server):
    """A PostgreSQL cluster with everything as installed: fsync on, no tuning."""

    stop_signal = "QUIT"  # at once: the next start recovers, as after a crash
    user = "djqueue"

    def __init__(self) -> None:
        self.binaries = postgres_binaries()
        super().__init__()
        self._names = itertools.count(1)

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{name}"

    def create_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"scratch_{next(self._names)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.database_url(name)

    def start(self) -> None:
        if not (self.folder / "data").exists():
            self._initialise()
        super().start()

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "max_connections": 200,
        }
        options = itertools.chain.from_iterable(("-c", f"{k}={v}") for k, v in settings.items())
        return [str(self.binaries / "postgres"), "-D", str(self.folder / "data"), *options]

    def is_ready(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initialise(self) -> None:
        account = self._process_options().get("user")
        if account is not None:
            shutil.chown(self.folder, user=account)
        subprocess.run(
            [
                *(self.binaries / "initdb", "-D", self.folder / "data", "-U", self.user),
                *("--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            **self._process_options(),
        )

    def _process_options(self) -> dict[str, object]:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return {"cwd": self.folder}
        account = unprivileged_account()
        return {"cwd": self.folder, "user": account, "group": account, "extra_groups": []}


class RedisServer(Server):
    """A Redis (or Valkey) that keeps nothing on disk."""

    def __init__(self) -> None:
        self.binary = find_program("redis-server", "valkey-server", package="redis")
        super().__init__()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        options = {
            "--port": self.port,
            "--bind": "127.0.0.1",
            "--dir": self.folder,
            "--save": "",
            "--appendonly": "no",
        }
        return [self.binary, *(str(part) for option in options.items() for part in option)]

    def is_ready(self) -> bool:
        with redis.Redis(port=self.port, socket_timeout=5, retry=None) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


def postgres_binaries() -> Path:
    """The folder of the newest PostgreSQL's programs."""
    folders = [Path(name) for pattern in POSTGRES_FOLDERS for name in glob(pattern)]
    folders.sort(key=lambda folder: int("".join(filter(str.isdigit, folder.parent.name)) or 0))
    for folder in reversed(folders):
        if (folder / "initdb").exists():
            return folder
    return Path(find_program("initdb", package="postgresql")).resolve().parent


def find_chromium() -> str:
    chosen = os.environ.get("DJQUEUE_TEST_CHROMIUM")
    return find_program(*((chosen,) if chosen else CHROMIUM_NAMES), package="chromium")


def find_program(*names: str, package: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    raise MissingProgramError(f"{names[0]} is not installed: run `scripts/system-packages.sh {package}`")


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unprivileged_account() -> str:
    import pwd

    accounts = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in accounts else "nobody"


@contextlib.contextmanager
def postgres_environment() -> Iterator[dict[str, str]]:
    """The environment of a process whose Django database is a PostgreSQL of its own."""
    with PostgresServer() as server:
        yield {**os.environ, "DJQUEUE_TEST_DB": "postgresql", "DJQUEUE_TEST_PG": server.url}


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] != "postgresql":
        print(__doc__, file=sys.stderr)
        return 2
    with postgres_environment() as environment:
        return subprocess.run(arguments[1:], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
