"""Diagnosis of the servers: their state, and their memory by kind of key."""

from collections.abc import Iterator, Mapping, Sequence

import redis

from djqueue.core.errors import StorageError
from djqueue.core.messages import in_one_line, size
from djqueue.core.overview import BAD, OK, WARN, DiagnosticLine

from . import health
from .connections import Connections
from .keys import QueueKeys
from .roundtrips import ScriptCall, Steps
from .scripts import script

SAMPLED_QUEUES = 20
"""Queues whose keys are measured."""
UNSEEN = "The Redis user may not run INFO, CONFIG GET or MEMORY USAGE; only this page needs them."


def of_servers(connections: Connections) -> list[DiagnosticLine]:
    """Describe every master. Raises nothing: a line says why one cannot be reached."""
    lines: list[DiagnosticLine] = []
    try:
        for number, (where, server) in enumerate(health.servers(connections)):
            suffix = f":{number}" if number else ""
            if isinstance(server, Exception):
                reason = in_one_line(server)
                lines.append(DiagnosticLine(f"server.up{suffix}", where, "Reachable", "no", BAD, reason))
            else:
                lines += [line._replace(key=line.key + suffix, group=where) for line in _server(server)]
    except (redis.RedisError, OSError, StorageError) as error:
        reason = in_one_line(error)
        lines.append(DiagnosticLine("server.up", connections.describe(), "Reachable", "no", BAD, reason))
    return lines


def of_keys(queues: Sequence[QueueKeys]) -> Steps[list[DiagnosticLine]]:
    """Estimate the bytes of some queues by kind of key, each from five samples."""
    some = queues[:SAMPLED_QUEUES]
    if not some:
        return []
    called = script("sizes")
    answers = yield [ScriptCall(called, keys, (), sequence=False) for keys in some]
    note = ""
    if len(queues) > len(some):
        note = f"Sampled from the first {len(some)} of {len(queues):,} queues."
    lines = []
    for kind, sizes in zip(called.keys, zip(*answers, strict=True), strict=True):
        if min(sizes) < 0:
            return [DiagnosticLine("keys.bytes", "Keys", "Size", "unknown", OK, UNSEEN)]
        there = [number for number in sizes if number]
        if there:
            value = f"{len(there):,} keys, {size(sum(there))}"
            lines.append(DiagnosticLine(f"keys.{kind}", "Keys", kind, value, OK, note))
    return lines


def _server(server: health.MasterInfo) -> Iterator[DiagnosticLine]:
    info = server.info
    if info is None:
        yield DiagnosticLine("server.info", "", "INFO", "not permitted", OK, UNSEEN)
        info = {}
    known = {**health.from_info(info), **(server.config or {})}
    for key, label, names in PLAIN:
        values = [info[name] for name in names if name in info]
        if values:
            yield DiagnosticLine(f"server.{key}", "", label, " ".join(values))
    if "evicted_keys" in info:
        evicted = int(info["evicted_keys"])
        note = "Redis has evicted jobs or results: check maxmemory-policy." if evicted else ""
        yield DiagnosticLine(
            "server.evicted", "", "Evicted keys", f"{evicted:,}", BAD if evicted else OK, note
        )
    policy = known.get("maxmemory-policy")
    if policy is None:
        yield DiagnosticLine("server.policy", "", "maxmemory-policy", "unknown", OK, UNSEEN)
    else:
        is_safe = policy == "noeviction"
        note = "" if is_safe else "Redis deletes jobs when memory is full: set the policy to noeviction."
        yield DiagnosticLine("server.policy", "", "maxmemory-policy", policy, OK if is_safe else BAD, note)
    yield from _fragmentation(info)
    yield from _persistence(info, known)
    yield from _replicas(info)


PLAIN = (
    ("version", "Version", ("valkey_version",)),
    ("redis_version", "Redis version", ("redis_version",)),
    ("uptime", "Uptime, seconds", ("uptime_in_seconds",)),
    ("memory", "Memory used", ("used_memory_human",)),
    ("memory_limit", "Memory limit (0B: none)", ("maxmemory_human",)),
    ("ops", "Commands per second", ("instantaneous_ops_per_sec",)),
    ("clients", "Clients", ("connected_clients",)),
    ("scripts", "Cached scripts", ("number_of_cached_scripts",)),
    ("keys", "Keys", ("db0",)),
)
"""(key, label, names in INFO)."""


def _fragmentation(info: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    if "mem_fragmentation_ratio" in info and "used_memory" in info:
        ratio = float(info["mem_fragmentation_ratio"])
        # It says nothing about a server that is nearly empty.
        is_high = ratio > 1.5 and int(info["used_memory"]) > 100_000_000
        level, note = (
            (WARN, "Redis holds far more system memory than its data uses.") if is_high else (OK, "")
        )
        yield DiagnosticLine("server.fragmentation", "", "Fragmentation ratio", f"{ratio:g}", level, note)


def _persistence(info: Mapping[str, str], known: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    appended = known.get("appendonly")
    saves = known.get("save")
    if appended is None:
        return
    value = f"appendonly {appended}" + (f", save {saves!r}" if saves is not None else "")
    is_lost = appended == "no" and saves == ""
    note = "A restart loses every job." if is_lost else ""
    yield DiagnosticLine("server.persistence", "", "Persistence", value, WARN if is_lost else OK, note)
    for name in ("aof_last_write_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            yield DiagnosticLine(
                f"server.{name}", "", name, info[name], BAD, "The last write to disk failed."
            )


def _replicas(info: Mapping[str, str]) -> Iterator[DiagnosticLine]:
    count = int(info.get("connected_slaves", "0"))
    if "connected_slaves" in info:
        yield DiagnosticLine("server.replicas", "", "Replicas", str(count))
    there = int(info.get("master_repl_offset", "0"))
    for number in range(count):
        fields = dict(part.split("=", 1) for part in info.get(f"slave{number}", "").split(",") if "=" in part)
        if "offset" in fields:
            behind = max(0, there - int(fields["offset"]))
            yield DiagnosticLine(
                f"server.replica_{number}",
                "",
                f"Replica {number} lag",
                size(behind),
                WARN if behind > 1_000_000 else OK,
            )
