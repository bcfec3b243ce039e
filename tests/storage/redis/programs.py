"""What child processes do, `python -m tests.storage.redis.programs NAME URL …`, and how tests speak to them.

They say what they have done on standard output, a line each, and are told what to do on standard input.
"""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from random import Random
from threading import Thread
from typing import Self

from tests.support import PATIENCE

BUSY = {"timeout": 25}
"""Options for a busy machine, where connecting may take longer than the default timeout."""
NEAR, FAR = "near", "far"
"""Queues that a cluster has on two servers."""
LEASE = 0.4
"""Seconds: that of the children's claims, unless a test gives another one."""


class Child:
    """A program in a process of its own. Whatever it is doing, the end of `with` kills it."""

    def __init__(self, program: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.storage.redis.programs", program, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def hears(self) -> list[str]:
        """The words of the next line that it says."""
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, "it has ended without another word"
        return line.split()

    def told(self) -> list[list[str]]:
        """The words of all lines that it says until its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        lines = []
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            lines.append(line.split())
        return lines

    def tell(self, *words: object) -> None:
        """Say a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def asked(self, *words: object) -> list[str]:
        """What it says when it is told something."""
        self.tell(*words)
        return self.hears()

    def freeze(self) -> None:
        """SIGSTOP: it does nothing, but is there."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.removesuffix("\n"))
        self._lines.put(None)


def say(*words: object) -> None:
    # One write: it is heard whole or not at all, whenever this process dies.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def commands() -> Iterator[list[str]]:
    for line in sys.stdin:
        yield line.split()


def nursery(url: str) -> None:
    """Forks a worker for each seed that it is told, so that one takes no time to start; kills any number."""
    from djqueue.storage.redis import RedisStorage

    workers: list[int] = []
    with closing(RedisStorage(url=url, **BUSY)) as storage:
        storage.enqueue([])  # what it needs is imported
    say("ready")
    for command in commands():
        match command:
            case ["fork", seed]:
                if not (child := os.fork()):
                    work(url, int(seed))
                workers.append(child)
            case ["kill", number]:
                kill(workers.pop(int(number) % len(workers)))
        say("done")
    for child in workers:
        kill(child)


def kill(child: int) -> None:
    if os.waitpid(child, os.WNOHANG)[0]:
        say("broken", child)
        return
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def work(url: str, seed: int) -> None:
    """Works at jobs until death: all kinds of ends, and new jobs of all kinds, of which it tells."""
    from djqueue.core.errors import OptionError, StorageUnavailableError
    from djqueue.storage.redis import RedisStorage
    from djqueue.testing.factories import request

    random = Random(seed)
    storage = RedisStorage(url=url, lease=LEASE, **BUSY)
    claimed = []
    made = 0
    while True:
        try:
            outcomes = [ending_of(random, one) for one in claimed]
            claimed = storage.finish(
                outcomes, request(random.randint(1, 9), worker=f"worker-{seed}")
            ).claims.jobs
            made += 1
            if random.random() < 0.5:
                for some in new_jobs(random, f"{seed}-{made}"):
                    tell_of(storage.enqueue(some))
            if random.random() < 0.2 or not claimed:
                storage.sweep()
            if random.random() < 0.1:
                storage.jobs.move(NEAR, [f"{seed}-{random.randint(1, made)}-plain"], FAR)
        except StorageUnavailableError:
            claimed = []
        except OptionError:
            pass  # a failover has lost the job that another was to wait for


def tell_of(results) -> None:
    for result in results:
        if result.status == "queued":
            say("queued", result.queue, result.id)


def ending_of(random: Random, claimed):
    from djqueue.testing.factories import cancelling, completing, failing, releasing, retrying

    if claimed.failures < 2 and claimed.stalls < 2:
        if random.random() < 0.1:
            return retrying(claimed, delay=random.choice((0, 1)))
        if random.random() < 0.05:
            return releasing(claimed)
    return random.choice((completing,) * 8 + (failing, cancelling))(claimed)


def new_jobs(random: Random, name: str):
    """Batches, call by call: jobs that wait alone, in a group, for their time, or for one elsewhere."""
    from djqueue.testing.factories import batch

    queue, other = random.sample((NEAR, FAR), 2)
    plain = batch(ids=[f"{name}-plain"], queue=NEAR, max_stalls=1_000)
    more = random.choice(
        (
            lambda: batch(3, queue=queue, max_stalls=1_000),
            lambda: batch(ids=[f"{name}-late"], queue=queue, delay=2, priority=random.randint(-1, 1)),
            lambda: batch(
                ids=[f"{name}-a", f"{name}-b"], queue=queue, concurrency_key=f"group-{random.randint(0, 2)}"
            ),
            lambda: batch(ids=[f"{name}-unique"], queue=queue, unique_key=f"key-{random.randint(0, 3)}"),
        )
    )()
    after = batch(
        ids=[f"{name}-after"],
        queue=other,
        depends_on=((NEAR, f"{name}-plain"),),
        on_dependency_failure="ignore",
    )
    return [[plain, more], [after]] if random.random() < 0.3 else [[plain, more]]


def holder(url: str, lease: str = str(LEASE), offset: str = "0") -> None:
    """Does what it is told; its own clock differs by so many seconds from that of others."""
    shift = int(offset) * 10**9
    now = time.time_ns
    time.time_ns = lambda: now() + shift
    time.time = lambda: (now() + shift) / 10**9

    from djqueue.storage.redis import RedisStorage
    from djqueue.testing.factories import claim, completing, enqueue, finish, lease_of, report_of, worker

    held = []
    with closing(RedisStorage(url=url, lease=float(lease), **BUSY)) as storage:
        say("ready")
        for command in commands():
            match command:
                case ["enqueue", *options]:
                    given = dict(option.split("=") for option in options)
                    say(enqueue(storage, **{name: _value(value) for name, value in given.items()}))
                case ["claim"]:
                    held = claim(storage, 10, worker=f"holder{offset}")
                    say(*(one.id for one in held))
                case ["renew"]:
                    say(*(renewal.held for renewal in storage.renew(list(map(lease_of, held)))))
                case ["report"]:
                    say(*storage.report([report_of(one, "late", [(1, "late")]) for one in held]))
                case ["finish"]:
                    say(*finish(storage, *map(completing, held)))
                case ["maintain"]:
                    say(*storage.sweep())
                case ["register"]:
                    storage.workers.register(worker(f"holder{offset}"))
                    say(*(info.id for info in storage.workers.all()))


def _value(text: str) -> object:
    return int(text) if text.lstrip("-").isdigit() else text


if __name__ == "__main__":
    import django

    django.setup()
    globals()[sys.argv[1]](*sys.argv[2:])
