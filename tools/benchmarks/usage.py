"""CPU time of other processes: of a session's processes, and of a Redis."""

import os
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def session_usage(session: int) -> dict[int, float]:
    """Return the seconds of CPU time of each process of a session; nothing where the system has no /proc."""
    return {pid: used for pid in session_members(session) if (used := process_usage(pid)) is not None}


def session_members(session: int) -> list[int]:
    """Return the processes of a session, oldest first."""
    found = []
    for entry in PROC.glob("[0-9]*"):
        fields = stat_fields(entry)
        if fields and int(fields[3]) == session:
            found.append((int(fields[19]), int(entry.name)))  # by start time
    return [pid for _, pid in sorted(found)]


def session_memory(session: int) -> int:
    """Return the bytes of memory that the processes of a session have to themselves."""
    found = 0
    for pid in session_members(session):
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) * 1_024
    return found


def stat_fields(process: Path) -> list[str]:
    """Return what /proc/PID/stat says behind the name of the program."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def process_usage(pid: int) -> float | None:
    """Return the seconds of CPU time of a process and of its children that have ended, or None if it has."""
    fields = stat_fields(PROC / str(pid))
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return None
    total = 0
    for thread in threads:
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except OSError:  # the thread has ended, or the kernel counts nothing
            continue
    children = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    return total / 1e9 + children


def redis_usage(server: Any) -> float:
    """Return the seconds of CPU time that a Redis has used."""
    with server.client() as client:
        found = client.info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])
