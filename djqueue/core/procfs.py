"""Processes of this machine, as Linux shows them in /proc: whether they run, and what they use."""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
BLOCK = 512
"""Bytes of a block, as `os.stat` counts them."""
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MAX_DESCENDANTS = 4_096
"""Maximum of descendants of a process that are looked at."""
SHARED = (b"/dev/zero (deleted)", b"/memfd:", b"/dev/shm/", b"/SYSV")
"""Beginnings of the names of mapped memory that exists on its own, also where no process has it mapped."""


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat."""

    state: str
    """R running | S, D sleeping | T, t stopped | Z zombie | X dead, and others."""
    parent: int
    processor_time: float
    """Seconds of processor time that the process has used."""
    threads: int
    started: str
    """When the process started, in ticks since the boot."""


def stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, can contain anything.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessStat(
        fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS, int(fields[17]), fields[19]
    )


def lock_holders(path: str, byte: int | None = None) -> list[str]:
    """Return the processes (id and name of the program) that have locked a file for writing.

    Args:
        path: The file.
        byte: A byte that the lock must include; None for any.
    """
    try:
        inode = os.stat(path).st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    holders = []
    for line in lines:
        fields = line.split()
        # 1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE START END; "->" marks one that waits.
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5].rpartition(":")[2] != str(inode):
            continue
        end = float("inf") if fields[7] == "EOF" else int(fields[7])
        if byte is None or int(fields[6]) <= byte <= end:
            holders.append(_described(fields[4]))
    return list(dict.fromkeys(holders))


def _described(pid: str) -> str:
    try:
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return pid


# Names of processes.


def host_name() -> str:
    """Return a name for this machine, boot and PID namespace; processes of one name can see each other."""
    if not (boot := _boot_id()):
        return socket.gethostname()
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot[:8]}/{namespace}"


@cache
def _boot_id() -> str:
    """Return the id of this boot; "" if the system has none. Read once: later, no descriptor may be free."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def boot_of(host: str | None = None) -> str:
    """Return the boot of a machine, in the form of `host_name`; "" if unknown. None: of this one."""
    parts = (host_name() if host is None else host.partition("@")[0]).split("/")
    return parts[1] if len(parts) > 1 else ""


def start_mark(pid: int) -> str:
    """Return "@" and the start time of a process, which a later process with its id lacks; "" if unknown."""
    found = stat(pid)
    return f"@{found.started}" if found is not None else ""


def this_process() -> str:
    """Return a name that no other process with the id of this one has: `host_name` and its start."""
    return host_name() + start_mark(os.getpid())


def died_here(pid: int, name: str) -> bool:
    """Return whether a process with a name like `this_process` was one of this machine and has ended."""
    return _is_here(name) and not exists(pid, name)


def lives_here(pid: int, name: str) -> bool:
    """Return whether a process with a name like `this_process` is running on this machine."""
    return _is_here(name) and exists(pid, name)


def exists(pid: int, name: str) -> bool:
    """Return whether a process of this machine is running: the one that started when its name says."""
    _, mark, started = name.partition("@")
    found = stat(pid)
    if found is not None:
        if mark and found.started != started:
            return False  # Another process has the id now.
        if found.state in "ZX" and found.threads <= 1:
            return False  # It has ended, and its parent has not read its exit code yet.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_here(name: str) -> bool:
    host = name.partition("@")[0]
    return host == host_name() and "/" in host


# Children and resources of processes.


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        # A thread, or the process, ended in the meantime.
        return pids
    return pids


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    found = stat(pid)
    return 0 if found is None else found.parent


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, parents first; at most `MAX_DESCENDANTS`."""
    pids: list[int] = []
    left = [pid]
    while left and len(pids) < MAX_DESCENDANTS:
        direct = children(left.pop())
        pids += direct
        left += direct
    return pids[:MAX_DESCENDANTS]


def threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    try:
        # A directory has a link for each directory in it, and two more.
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def busy_time(thread: int) -> int:
    """Return the milliseconds for which a thread of this process has run, or has waited for a processor.

    Without /proc, or if the thread has ended, it is 0.
    """
    try:
        running, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(running) + int(waiting)) // 1_000_000


def memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    return mapped_and_resident(pid)[1]


def mapped_and_resident(pid: int) -> tuple[int, int]:
    """Return the bytes of the address space of a process, and those that are resident; 0 if it has ended."""
    try:
        mapped, resident = _statm(f"/proc/{pid}")
        if not mapped:
            mapped, resident = _statm(_with_memory(pid))
    except (OSError, ValueError):
        return 0, 0
    return mapped * PAGE_SIZE, resident * PAGE_SIZE


def unmapped_memory(pids: Iterable[int]) -> int:
    """Return at most how many bytes some processes use beside their resident ones.

    These are the pages in the swap and huge pages, and all shared memory: `madvise` takes the pages of
    such memory from a process, and does not free them.
    """
    return sum(map(_swapped, pids)) + sum(_shared_objects(pids).values())


def exact_memory(pids: Sequence[int]) -> int:
    """Return the bytes that some processes use; what they share counts once. This takes milliseconds."""
    private = shared = 0
    for pid in pids:
        sizes = _kilobytes(pid, "smaps_rollup")
        # What has ended meanwhile, or may not be read, counts by its resident bytes.
        private += sizes["Pss"] - sizes.get("Pss_Shmem", 0) if "Pss" in sizes else memory(pid)
        private += _swapped(pid)
        shared += sizes.get("Pss_Shmem", 0)
    return private + max(shared, sum(_shared_objects(pids).values()))


def _with_memory(pid: int) -> str:
    """Return the folder of /proc of a thread that still has the memory of a process.

    The first thread may have ended before the others; the process then appears without any.
    """
    found = stat(pid)
    if found is not None and found.state == "Z" and found.threads > 1:
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(task) != pid:
                return f"/proc/{pid}/task/{task}"
    return f"/proc/{pid}"


def _statm(folder: str) -> tuple[int, int]:
    with open(f"{folder}/statm", "rb", buffering=0) as file:
        mapped, resident, *_ = map(int, file.read(64).split())
    return mapped, resident


def _kilobytes(pid: int, name: str) -> dict[str, int]:
    """Return the fields of a file of /proc that are sizes, in bytes."""
    sizes = {}
    try:
        for line in Path(f"{_with_memory(pid)}/{name}").read_text(errors="replace").splitlines():
            if line.endswith(" kB"):
                field, size, _ = line.rsplit(maxsplit=2)
                sizes[field.rstrip(":")] = int(size) * 1_024
    except (OSError, ValueError):
        return {}
    return sizes


def _swapped(pid: int) -> int:
    sizes = _kilobytes(pid, "status")
    return sizes.get("VmSwap", 0) + sizes.get("HugetlbPages", 0)


def _shared_objects(pids: Iterable[int]) -> dict[tuple[int, int, int], int]:
    """Return the bytes of the shared memory that some processes have mapped or open, each object once."""
    sizes: dict[tuple[int, int, int], int] = {}
    for pid in pids:
        with suppress(OSError):  # It has ended, or belongs to another user.
            folder = _with_memory(pid)
            for key, size in _mapped_objects(folder):
                sizes[key] = max(size, sizes.get(key, 0))
            sizes.update(_open_objects(folder))
    return sizes


def _mapped_objects(folder: str) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield an object and its bytes for each mapping. Only root can see how many of them are in use."""
    maps = Path(f"{folder}/maps").read_bytes()
    if not any(name in maps for name in SHARED):
        return
    for line in maps.splitlines():
        area, _, offset, device, inode, *name = line.split(maxsplit=5)
        if not name or not name[0].startswith(SHARED):
            continue
        major, _, minor = device.partition(b":")
        start, _, end = area.partition(b"-")
        size = int(offset, 16) + int(end, 16) - int(start, 16)
        with suppress(OSError):
            size = os.stat(f"{folder}/map_files/{area.decode()}").st_blocks * BLOCK
        yield (int(major, 16), int(minor, 16), int(inode)), size


def _open_objects(folder: str) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield an object and its bytes in use for each descriptor."""
    for name in os.listdir(f"{folder}/fd"):
        path = f"{folder}/fd/{name}"
        with suppress(OSError):  # It was closed in the meantime.
            if os.fsencode(os.readlink(path)).startswith(SHARED):
                found = os.stat(path)
                key = os.major(found.st_dev), os.minor(found.st_dev), found.st_ino
                yield key, found.st_blocks * BLOCK


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0 if it has ended."""
    found = stat(pid)
    return found.processor_time if found is not None else 0.0
