"""Checks and diagnosis of the servers: their state, settings that could lose jobs, and keys that were lost.

Managed servers and access lists may forbid INFO or CONFIG. That is no failure; a finding says what could
not be checked.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import redis

from djqueue.core.errors import StorageError
from djqueue.core.messages import gettext_noop as _
from djqueue.core.messages import in_one_line, size
from djqueue.core.overview import (
    BAD,
    EVICTS,
    KEYS_OF_SIZE,
    NOT_WRITTEN,
    OK,
    REPLICA_LAG,
    SAMPLED,
    WARN,
    DiagnosticLine,
    Finding,
    system_finding,
)
from djqueue.core.policies import QueuePolicy

from .client import IDLE, Connection, spelled
from .connections import Connections
from .keys import QueueKeys
from .keyspace import Keyspace
from .options import RedisOptions
from .retries import remedy
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

OLDEST = {"Redis": (7, 0), "Valkey": (7, 2)}
SHORTEST_BUSY = 50
"""Milliseconds that scripts need at least: one of a thousand jobs takes several."""
SETTINGS = (
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "save",
    "timeout",
    "busy-reply-threshold",
    "min-replicas-to-write",
)
SAMPLED_QUEUES = 20
"""Queues whose keys are measured."""
UNSEEN = _("The Redis user may not run INFO, CONFIG GET or MEMORY USAGE; only this page needs them.")
INFO_LINES = (
    ("version", _("Version"), ("valkey_version",)),
    ("redis_version", _("Redis version"), ("redis_version",)),
    ("uptime", _("Uptime, seconds"), ("uptime_in_seconds",)),
    ("memory", _("Memory used"), ("used_memory_human",)),
    ("memory_limit", _("Memory limit (0B: none)"), ("maxmemory_human",)),
    ("ops", _("Commands per second"), ("instantaneous_ops_per_sec",)),
    ("clients", _("Clients"), ("connected_clients",)),
    ("scripts", _("Cached scripts"), ("number_of_cached_scripts",)),
    ("keys", _("Keys"), ("db0",)),
)
"""(key, label, names in INFO)."""


class MasterInfo(NamedTuple):
    """The version and settings of a master."""

    info: Mapping[str, str] | None
    """INFO; None if it is not allowed."""
    config: Mapping[str, str] | None
    """CONFIG GET of `SETTINGS`; None if it is not allowed."""


def findings(connections: Connections) -> list[Finding]:
    """Return the findings about every master. Raises nothing."""
    addresses_of: dict[Finding, list[str]] = {}
    try:
        for where, server in servers(connections):
            if isinstance(server, Exception):
                addresses_of.setdefault(unreachable(server), []).append(where)
                continue
            for finding in _of_server(server):
                addresses_of.setdefault(finding, []).append(where)
    except (redis.RedisError, OSError, StorageError) as error:
        addresses_of.setdefault(unreachable(error), []).append(connections.describe())
    return [
        finding._replace(text=f"{', '.join(addresses)}: {finding.text}")
        for finding, addresses in addresses_of.items()
    ]


def lease_findings(options: RedisOptions, policies: Mapping[str, QueuePolicy]) -> list[Finding]:
    """Return the findings about leases: a renewal may take longer than the lease."""
    timeout = options.timeout
    leases = {name: policy.lease for name, policy in policies.items()}
    leases["every other queue"] = options.lease
    return [
        system_finding(
            "djqueue.W006",
            f"the lease of {name} ({lease / 1_000:g} s) is not longer than TIMEOUT ({timeout:g} s): while "
            "Redis is slow or failing over, leases can expire while the worker is still trying to renew "
            "them.",
            "Lengthen LEASE or shorten TIMEOUT.",
        )
        for name, lease in leases.items()
        if lease <= timeout * 1_000
    ]


def refuse_old(connections: Connections) -> None:
    """Raise StorageError if a master is known to be too old."""
    # A server that does not reply raises an error when it is used.
    with suppress(redis.RedisError, OSError):
        for where, connection in _masters(connections):
            info = None
            with suppress(redis.RedisError, OSError), _opened(connection):
                info = _info(connection, "server")
            if info is not None and _is_old(info):
                finding = _too_old(info)
                raise StorageError(f"{where}: {finding}")


def unreachable(error: Exception) -> Finding:
    """Return the finding about a server that can't be reached."""
    reason = in_one_line(error)
    return system_finding(
        "djqueue.W007",
        f"its state could not be read: {reason}",
        remedy(error),
    )


def server_lines(connections: Connections) -> list[DiagnosticLine]:
    """Describe every master. Raises nothing: a line says why one cannot be reached."""
    lines: list[DiagnosticLine] = []
    try:
        for number, (where, server) in enumerate(servers(connections)):
            suffix = f":{number}" if number else ""
            if isinstance(server, Exception):
                lines.append(_unreachable_line(f"server.up{suffix}", where, server))
            else:
                lines += [line._replace(key=line.key + suffix, group=where) for line in _server_lines(server)]
    except (redis.RedisError, OSError, StorageError) as error:
        lines.append(_unreachable_line("server.up", connections.describe(), error))
    return lines


def _unreachable_line(key: str, where: str, error: Exception) -> DiagnosticLine:
    return DiagnosticLine(key, where, _("Reachable"), _("no"), BAD, in_one_line(error))


def key_lines(queues: Sequence[QueueKeys]) -> Steps[list[DiagnosticLine]]:
    """Estimate the bytes of some queues by kind of key, each from five samples."""
    sampled = queues[:SAMPLED_QUEUES]
    if not sampled:
        return []
    called = script("sizes")
    answers = yield [ScriptCall(called, keys, (), sequence=False) for keys in sampled]
    note = ""
    if len(queues) > len(sampled):
        note = SAMPLED % (len(sampled), f"{len(queues):,}")
    lines = []
    for kind, sizes in zip(called.keys, zip(*answers, strict=True), strict=True):
        if min(sizes) < 0:
            return [DiagnosticLine("keys.bytes", _("Keys"), _("Size"), _("unknown"), OK, UNSEEN)]
        existing = [number for number in sizes if number]
        if existing:
            value = KEYS_OF_SIZE % (f"{len(existing):,}", size(sum(existing)))
            lines.append(DiagnosticLine(f"keys.{kind}", _("Keys"), kind, value, OK, note))
    return lines


def servers(connections: Connections) -> Iterator[tuple[str, MasterInfo | Exception]]:
    """Yield the address of each master, and its settings or the error of reading them.

    Raises a RedisError, OSError or StorageError if the masters can't be found.
    """
    for where, connection in _masters(connections):
        try:
            server: MasterInfo | Exception = _look(connection)
        except (redis.RedisError, OSError) as error:
            server = error
        yield where, server


def evicted_keys(connections: Connections) -> int:
    """Return the number of keys that the masters have evicted; 0 of those whose INFO is not allowed.

    Raises a RedisError, OSError or StorageError if a master can't be reached.
    """
    evicted = 0
    for _where, connection in _masters(connections):
        with _opened(connection):
            evicted += _number((_info(connection, "stats") or {}).get("evicted_keys"))
    return evicted


def _masters(connections: Connections) -> Iterator[tuple[str, Connection]]:
    if not connections.is_cluster:
        yield connections.describe(), connections.dedicated()
        return
    client: Any = connections.sync()
    for node in client.get_primaries():
        address = (node.host, int(node.port))
        yield f"redis {spelled(address)}", connections.dedicated(address)


@contextmanager
def _opened(connection: Any) -> Iterator[None]:
    try:
        connection.connect()
        yield
    finally:
        connection.disconnect()


def _look(connection: Connection) -> MasterInfo:
    with _opened(connection):
        return MasterInfo(_info(connection), _config(connection))


def _info(connection: Connection, *sections: str) -> dict[str, str] | None:
    answer = _asked(connection, "INFO", *sections)
    if answer is None:
        return None
    lines = (line.partition(":") for line in _text(answer).splitlines())
    return {name: value for name, _, value in lines if value}


def _config(connection: Connection) -> dict[str, str] | None:
    answer = _asked(connection, "CONFIG", "GET", *SETTINGS)
    if answer is None:
        return None
    words = [_text(word) for word in answer]
    return dict(zip(words[::2], words[1::2], strict=True))


def _asked(connection: Connection, *words: str) -> Any:
    """Return the reply; None if the command is not allowed."""
    one: Any = connection
    one.send_command(*words, check_health=False)
    try:
        return one.read_response()
    except redis.ResponseError:
        return None


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _of_server(server: MasterInfo) -> Iterator[Finding]:
    info, config = server.info, server.config
    if info is not None and _is_old(info):
        yield _too_old(info)
        return
    known = {**_from_info(info or {}), **(config or {})}
    if info is None:
        yield _unseen("INFO", "its version")
    missing = [name for name in SETTINGS if name not in known]
    if config is None and missing:
        yield _unseen("CONFIG GET", ", ".join(missing))
    yield from _memory(known)
    yield from _persistence(known)
    yield from _times(known)
    if _number((info or {}).get("connected_slaves")) and known.get("min-replicas-to-write") == "0":
        yield system_finding(
            "djqueue.W014",
            "min-replicas-to-write is 0: a master that is being replaced, or is cut off from its replicas, "
            "still accepts jobs, which are then lost.",
            "Set min-replicas-to-write to 1 and min-replicas-max-lag to 10; pass durable=True for jobs "
            "that must survive a failover.",
        )


def _from_info(info: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that INFO contains, too."""
    settings = {}
    if "maxmemory_policy" in info:
        settings["maxmemory-policy"] = info["maxmemory_policy"]
    if "aof_enabled" in info:
        settings["appendonly"] = "yes" if info["aof_enabled"] == "1" else "no"
    if info.get("role") == "master" and "min_slaves_good_slaves" not in info:
        settings["min-replicas-to-write"] = "0"  # otherwise INFO says how many there are
    return settings


def _memory(known: Mapping[str, str]) -> Iterator[Finding]:
    policy = known.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        problem, remedy = EVICTS
        yield system_finding("djqueue.W008", problem % policy, remedy)


def _persistence(known: Mapping[str, str]) -> Iterator[Finding]:
    if known.get("appendonly") == "no" and known.get("save") == "":
        yield system_finding("djqueue.W009", *NOT_WRITTEN)
    if known.get("appendonly") == "yes" and known.get("appendfsync") == "no":
        yield system_finding(
            "djqueue.I002",
            "appendfsync is no: a power failure loses the latest writes, often those of the last 30 seconds.",
            "Set appendfsync to everysec or always.",
        )


def _times(known: Mapping[str, str]) -> Iterator[Finding]:
    timeout = _number(known.get("timeout"))
    if 0 < timeout <= IDLE:
        yield system_finding(
            "djqueue.W010",
            f"timeout is {timeout}: Redis closes connections that are idle for {timeout} s, and the next "
            "call has to reconnect or is retried.",
            f"Set timeout to 0, or to more than {IDLE}.",
        )
    busy = _number(known.get("busy-reply-threshold"))
    if 0 < busy < SHORTEST_BUSY:
        yield system_finding(
            "djqueue.W011",
            f"busy-reply-threshold is {busy}: while a script of many jobs runs, all other calls are "
            "rejected with BUSY.",
            f"Set busy-reply-threshold to {SHORTEST_BUSY} or more; 5000 is the default.",
        )


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() else 0


def _kind(info: Mapping[str, str]) -> tuple[str, str]:
    """Return Redis or Valkey, and its version."""
    if "valkey_version" in info:
        return "Valkey", info["valkey_version"]
    # Other servers report the version of Redis that they are compatible with.
    return "Redis", info.get("redis_version", "")


def _is_old(info: Mapping[str, str]) -> bool:
    kind, version = _kind(info)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST[kind]


def _too_old(info: Mapping[str, str]) -> Finding:
    needed = " or ".join(f"{kind} {major}.{minor}" for kind, (major, minor) in OLDEST.items())
    return system_finding(
        "djqueue.E006",
        f"this is {' '.join(_kind(info))}, but djqueue requires {needed}, or newer.",
        "Upgrade the server, or use another storage.",
    )


def _unseen(command: str, what: str) -> Finding:
    return system_finding(
        "djqueue.I001",
        f"the user may not run {command}, so {what} could not be checked.",
        "Compare the server's settings with the recommended ones in the docs, under Redis.",
    )


def _server_lines(server: MasterInfo) -> Iterator[DiagnosticLine]:
    info = server.info
    if info is None:
        yield DiagnosticLine("server.info", "", "INFO", _("not permitted"), OK, UNSEEN)
        info = {}
    known = {**_from_info(info), **(server.config or {})}
    for key, label, names in INFO_LINES:
        values = [info[name] for name in names if name in info]
        if values:
            yield DiagnosticLine(f"server.{key}", "", label, " ".join(values))
    if "evicted_keys" in info:
        evicted = int(info["evicted_keys"])
        note = _("Redis has evicted jobs or results: check maxmemory-policy.") if evicted else ""
        yield DiagnosticLine(
            "server.evicted", "", _("Evicted keys"), f"{evicted:,}", BAD if evicted else OK, note
        )
    policy = known.get("maxmemory-policy")
    if policy is None:
        yield DiagnosticLine("server.policy", "", "maxmemory-policy", _("unknown"), OK, UNSEEN)
    else:
        note = " ".join(map(str, _memory(known)))
        yield DiagnosticLine("server.policy", "", "maxmemory-policy", policy, BAD if note else OK, note)
    yield from _fragmentation_lines(info)
    yield from _persistence_lines(info, known)
    yield from _replica_lines(info)


def _fragmentation_lines(info: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    if "mem_fragmentation_ratio" in info and "used_memory" in info:
        ratio = float(info["mem_fragmentation_ratio"])
        # It says nothing about a server that is nearly empty.
        is_high = ratio > 1.5 and int(info["used_memory"]) > 100_000_000
        level, note = (
            (WARN, _("Redis holds far more system memory than its data uses.")) if is_high else (OK, "")
        )
        yield DiagnosticLine("server.fragmentation", "", _("Fragmentation ratio"), f"{ratio:g}", level, note)


def _persistence_lines(info: Mapping[str, str], known: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    appended = known.get("appendonly")
    saves = known.get("save")
    if appended is None:
        return
    value = f"appendonly {appended}" + (f", save {saves!r}" if saves is not None else "")
    note = " ".join(str(finding) for finding in _persistence(known) if finding.level == "warning")
    yield DiagnosticLine("server.persistence", "", _("Persistence"), value, WARN if note else OK, note)
    for name in ("aof_last_write_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            yield DiagnosticLine(
                f"server.{name}", "", name, info[name], BAD, _("The last write to disk failed.")
            )


def _replica_lines(info: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    count = int(info.get("connected_slaves", "0"))
    if "connected_slaves" in info:
        yield DiagnosticLine("server.replicas", "", _("Replicas"), str(count))
    offset = int(info.get("master_repl_offset", "0"))
    for number in range(count):
        fields = dict(part.split("=", 1) for part in info.get(f"slave{number}", "").split(",") if "=" in part)
        if "offset" in fields:
            behind = max(0, offset - int(fields["offset"]))
            yield DiagnosticLine(
                f"server.replica_{number}",
                "",
                REPLICA_LAG % number,
                size(behind),
                WARN if behind > 1_000_000 else OK,
            )


RED_FOR = 600_000
"""Milliseconds for which a loss stays a problem, so that all who watch see it."""
FLUSHED = "keys were flushed, or Redis came back without them: jobs are lost"
EVICTED = "Redis has evicted keys, because its memory is full: jobs or results are lost"
REMEDIES = {
    FLUSHED: "Give djqueue a server or database of its own, and keep its data on disk. Jobs come back with "
    "`manage.py djqueue restore-from-mirror`, or from a backup.",
    EVICTED: "Set maxmemory-policy to noeviction, and raise maxmemory.",
}


class Mark(NamedTuple):
    """The value of the marker."""

    id: str
    lost_at: int = 0
    """When a loss was noticed, in UTC milliseconds; 0 for never."""
    loss: str = ""
    evicted: int = 0
    """Keys that the servers had evicted when it was written."""


class Marker:
    """The marker of a storage, and what this process knows of it.

    A process that has seen the marker notices that it has gone or is another one. It then writes one that
    says so, for all other processes.
    """

    def __init__(self, keyspace: Keyspace, connections: Connections, now: Callable[[], int]) -> None:
        self._keyspace = keyspace
        self._connections = connections
        self._key = keyspace.common.key("marker")
        self._now = now
        self._seen: str | None = None

    def look(self) -> Sequence[Finding]:
        """Write the marker, and return the loss of keys that was noticed in the last minutes."""
        mark = self._read()
        evicted = self._evicted(0 if mark is None else mark.evicted)
        new = Mark(secrets.token_hex(8), evicted=evicted)
        if self._seen is not None and (mark is None or (mark.id != self._seen and not mark.lost_at)):
            mark = new._replace(lost_at=self._now(), loss=FLUSHED)
        elif mark is not None and evicted > mark.evicted:
            mark = new._replace(lost_at=self._now(), loss=EVICTED)
        elif mark is None:
            mark = new
        self._keyspace.ask(RedisCommand((b"SET", self._key, json.dumps(mark._replace(evicted=evicted)))))
        self._seen = mark.id
        if not mark.lost_at or self._now() - mark.lost_at > RED_FOR:
            return ()
        ago = (self._now() - mark.lost_at) // 1_000
        text = f"{mark.loss} (noticed {ago} s ago; reported for {RED_FOR // 60_000} minutes)"
        return [Finding("health.storage", "error", text, REMEDIES.get(mark.loss, REMEDIES[FLUSHED]))]

    def _read(self) -> Mark | None:
        found = self._keyspace.ask(RedisCommand((b"GET", self._key)))
        return None if found is None else Mark(*json.loads(found))

    def _evicted(self, before: int) -> int:
        """Return how many keys the servers have evicted since they started."""
        try:
            return evicted_keys(self._connections)
        except (redis.RedisError, OSError, StorageError):
            return before  # The other calls of the probe tell whether the server answers.
