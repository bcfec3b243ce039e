"""Three hosts share the jobs of one PostgreSQL, and one of them is cut off: `python -m tools.hosts`.

Each host is a network namespace with its own host name and process ids, in which `manage.py runworkers` runs.
First, the hosts drain a backlog of no-op jobs: each should do a third of it, within 20 %. Then the third one
loses its link while jobs run: they must return to the others after its lease, and none may be lost or ended
twice. Finally, the link comes back, and the host must work again. The exit code is 1 if anything is wrong.

Needs root and `ip` of iproute2, on Linux.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.runtime.project import Project, close_consoles
from tests.servers import PostgresServer
from tests.support import eventually
from tools.benchmarks.projects import ON_POSTGRESQL

HOSTS = ("djq1", "djq2", "djq3")
BRIDGE, NETWORK = "djq0", "10.213.7"
LEASE, SECONDS = 10, 0.2
"""Seconds of a lease, and of a job that runs while a host is cut off."""
WARM, SHARED = 300, 30_300
"""Numbers of the first job that is counted, and of the first one that may run while a host is cut off."""
JOBS = """
import asyncio, os, socket, time
from djqueue import job

MARKS = os.open(f"marks-{socket.gethostname()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@job
async def work(n, seconds):
    os.write(MARKS, f"begin {n} {time.monotonic()}\\n".encode())
    await asyncio.sleep(seconds)
    os.write(MARKS, f"end {n} {time.monotonic()}\\n".encode())
"""
CONSOLE = """
import django; django.setup()
from djqueue import Queue
from djqueue.models import Job
from shop.jobs import work
queue = Queue("default")
"""


class ReachableServer(PostgresServer):
    """A PostgreSQL that the hosts can reach."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", f"listen_addresses=127.0.0.1,{NETWORK}.254"]

    def _initialise(self) -> None:
        super()._initialise()
        with (self.folder / "data" / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {NETWORK}.0/24 trust\n")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def connect(stack: ExitStack) -> None:
    """Connect the namespaces of all hosts to a bridge, until the stack ends."""
    ip(f"link add {BRIDGE} type bridge")
    stack.callback(ip, f"link delete {BRIDGE}")
    ip(f"address add {NETWORK}.254/24 dev {BRIDGE}")
    ip(f"link set {BRIDGE} up")
    for number, host in enumerate(HOSTS, 1):
        ip(f"netns add {host}")
        stack.callback(ip, f"netns delete {host}")
        ip(f"link add {host} type veth peer name eth0 netns {host}")
        stack.callback(ip, f"link delete {host}")
        ip(f"link set {host} master {BRIDGE} up")
        ip(f"-n {host} address add {NETWORK}.{number}/24 dev eth0")
        ip(f"-n {host} link set eth0 up")


def start(project: Project, host: str, stack: ExitStack) -> None:
    """Run `manage.py runworkers` on a host, until the stack ends."""
    command = f"ip netns exec {host} unshare --uts --pid --fork --mount-proc --kill-child sh -c".split()
    command += [f'hostname {host}; exec "$0" -m django runworkers', sys.executable]
    log = stack.enter_context((project.folder / f"{host}.log").open("wb"))
    process = subprocess.Popen(command, cwd=project.folder, env=project.variables, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)


def notes(project: Project, host: str, word: str, first: int = 0) -> dict[int, float]:
    """Return the times at which handlers of a host began or ended, by the numbers of their jobs."""
    path = project.folder / f"marks-{host}"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {int(n): float(at) for event, n, at in map(str.split, lines) if event == word}
    return {n: at for n, at in found.items() if n >= first}


def enqueue(project: Project, first: int, last: int, seconds: float) -> None:
    calls = f"[((n, {seconds}), {{}}) for n in range({first}, {last})]"
    project.run(f"{CONSOLE}queue.pause(); work.enqueue_many({calls}); queue.resume()")


def complete(project: Project, count: int) -> None:
    """Wait until so many jobs have completed."""
    counts = f"{CONSOLE}answer = queue.counts()['completed']"
    eventually(lambda: project.run(counts) >= count, timeout=600, message=f"{count} jobs have completed")


def check(project: Project) -> Iterator[str]:
    """Share, cut off, reconnect; yield what is wrong."""
    enqueue(project, 0, WARM, 0.02)
    eventually(lambda: all(notes(project, host, "end") for host in HOSTS), message="all hosts have run jobs")
    enqueue(project, WARM, SHARED, 0)
    complete(project, SHARED)
    for host in HOSTS:
        share = len(notes(project, host, "end", WARM)) / (SHARED - WARM)
        print(f"{host} did {share:.1%} of {SHARED - WARM:,} no-op jobs", flush=True)
        if abs(share * 3 - 1) > 0.2:
            yield f"{host} did {share:.1%}, not a third"

    *others, cut = HOSTS
    total = SHARED + 3_000
    enqueue(project, SHARED, total, SECONDS)
    eventually(lambda: len(notes(project, cut, "end", SHARED)) > 100, message="jobs run")
    ip(f"link set {cut} down")
    down = time.monotonic()
    complete(project, total)
    theirs, ours = notes(project, cut, "begin"), [notes(project, host, "begin") for host in others]
    again = sorted(at - down for found in ours for n, at in found.items() if n in theirs) or [0.0]
    # Workers run jobs that have stalled one at a time, so the first one shows when they returned.
    print(f"{len(again)} jobs of {cut} ran again {again[0]:.1f} to {again[-1]:.1f} s later", flush=True)
    if not 0 < again[0] <= LEASE + 2:
        yield f"the jobs of {cut} returned after {again[0]:.1f} s, with a lease of {LEASE} s"
    yield from (f"job {n} ran on both of the other hosts" for n in sorted(ours[0].keys() & ours[1].keys()))

    ip(f"link set {cut} up")
    before, up = len(notes(project, cut, "end")), time.monotonic()
    while len(notes(project, cut, "end")) == before and time.monotonic() < up + 120:
        enqueue(project, total, total + 60, SECONDS)
        total += 60
        complete(project, total)
    print(f"{cut} worked {time.monotonic() - up:.0f} s after {up - down:.0f} s without its link", flush=True)
    if len(notes(project, cut, "end")) == before:
        yield f"{cut} did not work again"
    rows = "Job.objects.filter(state='completed').count()"
    found = project.run(f"{CONSOLE}answer = [{rows}, queue.counts()['completed']]")
    print(f"{total:,} jobs; completed rows and counts: {found}", flush=True)
    if found != [total] * 2:
        yield f"{total} jobs were enqueued, but completed: {found}"


def main() -> int:
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        print("Skipped: network namespaces need Linux, root, and `ip` and `unshare`.")
        return 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        connect(stack)
        server = stack.enter_context(ReachableServer())
        name = server.create_database().rpartition("/")[2]
        settings = ON_POSTGRESQL % (name, server.port, server.user)
        settings += f'DATABASES["default"]["HOST"] = "{NETWORK}.254"\n'
        settings += f'DJQUEUE = {{"QUEUES": {{"default": {{"LEASE": {LEASE}}}}}}}\n'
        project = Project(folder, JOBS, settings)
        project.migrate()
        stack.callback(close_consoles)
        for host in HOSTS:
            start(project, host, stack)
        wrong = list(check(project))
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
