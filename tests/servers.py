"""Real servers for the tests, on free loopback ports, in temporary folders.

    python -m tests.servers postgresql COMMAND...

runs a command with `DJQUEUE_TEST_DB` and `DJQUEUE_TEST_PG` naming a PostgreSQL of its own.
`DJQUEUE_TEST_REDIS_SERVER` names the program that is run for Redis: a `valkey-server`, say.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any, Self

import psycopg
import redis
from redis.crc import key_slot

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


class UnprivilegedServer(Server):
    """A server that refuses to run as root: another account runs it then."""

    def give(self, folder: Path) -> None:
        """Give a folder to the account that runs the server."""
        account = self._process_options().get("user")
        if account is not None:
            shutil.chown(folder, user=account)

    def _process_options(self) -> dict[str, object]:
        if os.geteuid() != 0:
            return {"cwd": self.folder}
        account = unprivileged_account()
        return {"cwd": self.folder, "user": account, "group": account, "extra_groups": []}


class PostgresServer(UnprivilegedServer):
    """A PostgreSQL cluster with everything as installed: fsync on, no tuning. With `primary`, it follows
    that server until it is promoted."""

    stop_signal = "QUIT"  # at once: the next start recovers, as after a crash
    user = "djqueue"

    def __init__(self, primary: "PostgresServer | None" = None) -> None:
        self.binaries = postgres_binaries()
        self.primary = primary
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

    def rename_database(self, old: str, new: str) -> None:
        """Give a database that is not in use another name."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {old} RENAME TO {new}")

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

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile neither the postmaster nor a backend answers, while connections stay open."""
        postmaster = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGSTOP)  # first, so that it makes no further backends
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGSTOP)
        try:
            yield
        finally:
            for process in [*map(int, children), postmaster]:
                os.kill(process, signal.SIGCONT)

    def _initialise(self) -> None:
        self.give(self.folder)
        made = [self.binaries / "initdb", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        if self.primary is not None:
            made = [self.binaries / "pg_basebackup", "-R", "-h", "127.0.0.1", "-p", str(self.primary.port)]
        subprocess.run(
            [*made, "-D", self.folder / "data", "-U", self.user, "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            **self._process_options(),
        )


class PgBouncer(UnprivilegedServer):
    """A pooler in front of a PostgreSQL, which gives each transaction another connection."""

    stop_signal = "TERM"  # at once, whatever clients are doing

    def __init__(self, server: PostgresServer) -> None:
        self.binary = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        if self.binary is None:
            raise MissingProgramError(
                "pgbouncer is not installed: run `scripts/system-packages.sh pgbouncer`"
            )
        self.server = server
        super().__init__()

    def database_url(self, name: str) -> str:
        return f"postgresql://{self.server.user}@127.0.0.1:{self.port}/{name}"

    def command(self) -> list[str]:
        (self.folder / "users").write_text(f'"{self.server.user}" ""\n')
        file = self.folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self.server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self.folder / 'users'}\npool_mode = transaction\n"
        )
        self.give(self.folder)
        return [self.binary, str(file)]

    def is_ready(self) -> bool:
        try:
            psycopg.connect(self.database_url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


class RedisServer(Server):
    """A Redis (or Valkey) that keeps nothing on disk, unless `appendonly` has it write every change to
    a log before it answers. `config` holds further lines of its configuration; `program` is another one
    than that of all tests."""

    def __init__(
        self,
        *,
        appendonly: bool = False,
        config: Mapping[str, object] | None = None,
        program: str | None = None,
    ) -> None:
        self.binary = program or find_redis()
        self.config = {
            "save": "",
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": "always",
            **(config or {}),
        }
        super().__init__()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def options(self) -> dict[str, Any]:
        """What a storage's OPTIONS say about it."""
        return {"URL": self.url}

    def client(self) -> redis.Redis:
        """A client for the test itself, to be closed by `with`."""
        return redis.Redis(port=self.port, socket_timeout=30, retry=None, protocol=2, decode_responses=True)

    def run(self, *command: object) -> Any:
        """The answer to one command."""
        with self.client() as client:
            return client.execute_command(*command)

    def clean(self) -> None:
        """Make it run, and empty."""
        self.ensure_running()
        self.run("FLUSHALL")

    def ensure_running(self) -> None:
        """Start it if a test has left it stopped."""
        if not self.is_ready():
            self.stop()
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile it answers nobody, while its connections stay open."""
        with self.client() as client:
            process = client.info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process, signal.SIGCONT)

    def command(self) -> list[str]:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.folder, **self.config}
        return [self.binary, *itertools.chain.from_iterable((f"--{k}", str(v)) for k, v in options.items())]

    def is_ready(self) -> bool:
        try:
            return bool(self.run("PING"))
        except redis.RedisError:
            return False


class SentinelServer(RedisServer):
    """One sentinel, which keeps what it learns in its configuration file."""

    def __init__(self, master_name: str, master: RedisServer, quorum: int) -> None:
        super().__init__()
        self.master_name = master_name
        self.master = master
        self.quorum = quorum

    def command(self) -> list[str]:
        file = self.folder / "sentinel.conf"
        if not file.exists():
            host, port = self.master.address
            name = self.master_name
            file.write_text(
                f"sentinel monitor {name} {host} {port} {self.quorum}\n"
                # Longer than a busy machine keeps a master waiting, which would be replaced otherwise.
                f"sentinel down-after-milliseconds {name} 4000\n"
                f"sentinel failover-timeout {name} 2000\n"
            )
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder))
        return [self.binary, str(file), "--sentinel", *place]

    def start(self) -> None:
        super().start()
        # During a failover the replica says each second how it is: that is believed for five periods of
        # pinging, and other sentinels undo the failover if it takes longer than four of publishing.
        periods = {"INFO-PERIOD": 300, "PING-PERIOD": 300, "ASK-PERIOD": 100, "PUBLISH-PERIOD": 400}
        self.run("SENTINEL", "DEBUG", *itertools.chain.from_iterable(periods.items()))

    def master_port(self) -> int:
        return int(self.run("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master_name)[1])

    def is_settled(self, others: int) -> bool:
        """Whether it knows the other sentinels and a replica that has all that the master has."""
        with self.client() as client:
            state = client.sentinel_masters()[self.master_name]
            replicas = client.sentinel_slaves(self.master_name)
        return (
            state["flags"] == "master"
            and state["num-other-sentinels"] == others
            and [(replica["flags"], replica["master-link-status"]) for replica in replicas]
            == [("slave", "ok")]
        )


class ServerGroup:
    """Servers that work together; `with` starts and removes them."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()

    def prepare(self) -> None:
        """Start the servers and make them a group."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()


class RedisSentinel(ServerGroup):
    """A master, a replica, and three sentinels that agree within a second or two on who is which."""

    master_name = "djqueue"

    def __init__(self) -> None:
        super().__init__()
        # Without this, a replica is sent nothing new for up to a second after it is called online.
        self.nodes = [RedisServer(config={"repl-diskless-sync": "no"}) for _ in range(2)]
        self.sentinels: list[SentinelServer] = []

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.master_name}/0"

    @property
    def options(self) -> dict[str, Any]:
        """What a storage's OPTIONS say about it."""
        addresses = [sentinel.address for sentinel in self.sentinels]
        return {"SENTINELS": addresses, "MASTER_NAME": self.master_name}

    @property
    def master(self) -> RedisServer:
        """The server that most sentinels call the master."""
        ports = sorted(sentinel.master_port() for sentinel in self.sentinels)
        return next(node for node in self.nodes if node.port == ports[len(ports) // 2])

    @property
    def replica(self) -> RedisServer:
        return next(node for node in self.nodes if node is not self.master)

    def prepare(self) -> None:
        master, replica = (self._running.enter_context(node) for node in self.nodes)
        replica.run("REPLICAOF", *master.address)
        for _ in range(3):
            sentinel = SentinelServer(self.master_name, master, quorum=2)
            self.sentinels.append(self._running.enter_context(sentinel))
        self.settle()

    def settle(self) -> None:
        """Make all servers run, and wait until each knows its place and the replica is up to date."""
        for node in self.nodes:
            node.ensure_running()
        eventually(self._is_settled, message="the sentinels agree")

    def fail_over(self) -> RedisServer:
        """Have the sentinels make the replica the master, and the master its replica; the new master."""
        former = self.master
        leader = self.sentinels[0]

        def is_done() -> bool:
            if leader.master_port() == former.port:
                with contextlib.suppress(redis.ResponseError):  # it is at it
                    leader.run("SENTINEL", "FAILOVER", self.master_name)
            return self.master is not former

        eventually(is_done, message="the replica is the master")
        self.settle()
        return self.master

    def clean(self) -> None:
        """Make it run, and empty."""
        self.settle()
        self.master.run("FLUSHALL")

    def _is_settled(self) -> bool:
        others = len(self.sentinels) - 1
        if len({sentinel.master_port() for sentinel in self.sentinels}) > 1:
            return False
        with self.master.client() as client:
            state = client.info("replication")
        return state.get("slave0", {}).get("state") == "online" and all(
            sentinel.is_settled(others) for sentinel in self.sentinels
        )


class RedisCluster(ServerGroup):
    """Three masters with a third of the slots each, and no replicas."""

    slots = 16_384

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [self._make_node() for _ in range(3)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def options(self) -> dict[str, Any]:
        """What a storage's OPTIONS say about it."""
        return {"URL": self.url}

    def node_of(self, slot_or_key: int | str) -> RedisServer:
        """The server that has a slot, or the slot of a key."""
        slot = _slot(slot_or_key)
        ranges = self.nodes[0].run("CLUSTER", "SLOTS")
        port = next(master[1] for start, end, master, *_ in ranges if start <= slot <= end)
        return next(node for node in self.nodes if node.port == port)

    def other_than(self, server: RedisServer) -> RedisServer:
        """Another server of it."""
        return next(node for node in self.nodes if node is not server)

    def move_slot(self, slot_or_key: int | str, target: RedisServer) -> None:
        """Give a slot, with all that is in it, to another server, as `redis-cli --cluster reshard` does."""
        with self.moving_slot(slot_or_key, target):
            pass

    @contextlib.contextmanager
    def moving_slot(self, slot_or_key: int | str, target: RedisServer) -> Iterator[None]:
        """Meanwhile the slot's keys are at the target already, but the slot is not."""
        slot = _slot(slot_or_key)
        source = self.node_of(slot)
        source_id, target_id = (node.run("CLUSTER", "MYID") for node in (source, target))
        target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := source.run("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.run("MIGRATE", *target.address, "", 0, 5_000, "KEYS", *keys)
        yield
        while keys := source.run("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.run("MIGRATE", *target.address, "", 0, 5_000, "KEYS", *keys)
        for node in (target, source, *self.nodes):  # the target first: others learn from it
            node.run("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def prepare(self) -> None:
        for node in self.nodes:
            self._running.enter_context(node)
        first, *others = self.nodes
        share = self.slots // len(self.nodes)
        for index, node in enumerate(self.nodes):
            end = self.slots if node is self.nodes[-1] else (index + 1) * share
            node.run("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.run("CLUSTER", "ADDSLOTSRANGE", index * share, end - 1)
        for node in others:
            node.run("CLUSTER", "MEET", *first.address, first.config["cluster-port"])
        self.settle()

    def settle(self) -> None:
        """Make all servers run, and wait until each knows all slots to be served."""
        for node in self.nodes:
            node.ensure_running()
        eventually(lambda: all(map(self._is_settled, self.nodes)), message="the cluster is ok")

    def clean(self) -> None:
        """Make it run, and empty."""
        self.settle()
        for node in self.nodes:
            node.run("FLUSHALL")

    def _make_node(self) -> RedisServer:
        return RedisServer(
            config={
                "cluster-enabled": "yes",
                "cluster-config-file": "nodes.conf",
                # As servers have it: a busy machine keeps a node waiting for seconds, and one that counts as
                # failed for a moment answers "CLUSTERDOWN" for up to five seconds.
                "cluster-node-timeout": 15_000,
                "cluster-port": free_port(),  # the usual one, 10,000 higher, may be no port at all
            }
        )

    def _is_settled(self, node: RedisServer) -> bool:
        with node.client() as client:
            state = client.cluster("INFO")
        return (
            state["cluster_state"] == "ok"
            and int(state["cluster_known_nodes"]) == len(self.nodes)
            and int(state["cluster_slots_ok"]) == self.slots
        )


def _slot(slot_or_key: int | str) -> int:
    return slot_or_key if isinstance(slot_or_key, int) else key_slot(slot_or_key.encode())


def postgres_binaries() -> Path:
    """The folder of the newest PostgreSQL's programs."""
    folders = [Path(name) for pattern in POSTGRES_FOLDERS for name in glob(pattern)]
    folders.sort(key=lambda folder: int("".join(filter(str.isdigit, folder.parent.name)) or 0))
    for folder in reversed(folders):
        if (folder / "initdb").exists():
            return folder
    return Path(find_program("initdb", package="postgresql")).resolve().parent


def find_redis() -> str:
    chosen = os.environ.get("DJQUEUE_TEST_REDIS_SERVER")
    return find_program(*((chosen,) if chosen else ("redis-server", "valkey-server")), package="redis")


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
