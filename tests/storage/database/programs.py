"""What child processes run: `python -m tests.storage.database.programs NAME ARGUMENTS…`.

They write what they have done to standard output, and read what to do from standard input.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import django

from tests import children


class Child(children.Child):
    """One of these programs, in a process of its own."""

    programs = __name__


def say(*words: object) -> None:
    # One write: it arrives whole or not at all, whenever this process dies.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def commands() -> Iterator[list[str]]:
    say("ready")
    for line in sys.stdin:
        yield line.split()
        say("done")


@contextmanager
def storage(*, connect: bool = True, **options):
    from djqueue.storage.database import DatabaseStorage

    with closing(DatabaseStorage(**options)) as made:
        if connect:
            made.connect()
        yield made


def obedient(connect: str = "connected") -> None:
    """Obeys, with a connected storage or without."""
    from djqueue.core.job import Emission
    from djqueue.testing.factories import QUEUE, claim, completing, enqueue, failing, finish
    from djqueue.testing.factories import worker as worker_info

    with storage(connect=connect == "connected") as made:
        for command in commands():
            match command:
                case ["register"]:
                    made.workers.register(worker_info(pid=os.getpid(), heartbeat=5_000))
                case ["maintain"]:
                    made.maintain()
                case ["sweep"]:
                    made.sweep()
                case ["enqueue", id]:
                    enqueue(made, id=id)
                case ["enqueue", id, delay]:
                    enqueue(made, id=id, delay=int(delay))
                case ["begin", count]:
                    for one in claim(made, int(count)):
                        say(one.id)
                case ["complete", count]:
                    finish(made, *map(completing, claim(made, int(count))))
                case ["fail", count]:
                    finish(made, *map(failing, claim(made, int(count))))
                case ["emit"]:
                    [claimed] = claim(made, 1)
                    made.emit([Emission(QUEUE, claimed.id, claimed.token, 0, [b"1", b"2"])])
                    finish(made, completing(claimed))
                case ["reschedule", id, run_at]:
                    made.jobs.reschedule(QUEUE, [id], int(run_at))
                case ["cancel", id]:
                    made.jobs.cancel(QUEUE, [id])
                case ["remove", id]:
                    made.jobs.remove(QUEUE, [id])


def worker() -> None:
    """Completes each job as soon as it is woken, and says its id."""
    from djqueue.testing.factories import claim, completing, finish

    with storage() as made:
        woken = threading.Event()
        made.listen(None, woken.set)
        say("ready")
        while True:
            claimed = claim(made, 10)
            if claimed:
                finish(made, *map(completing, claimed))
                for one in claimed:
                    say(one.id)
            else:
                woken.wait()
                woken.clear()


def claimer(count: str) -> None:
    """Claims and completes jobs until none is left, and says their ids."""
    from djqueue.core.job import Outcome
    from djqueue.testing.factories import QUEUE, request

    with storage() as made:
        for _ in commands():
            claimed = made.claim(request(int(count))).jobs
            while claimed:
                for one in claimed:
                    say(one.id)
                outcomes = [Outcome(QUEUE, one.id, one.token, "complete") for one in claimed]
                finished = made.finish(outcomes, request(int(count)))
                assert all(finished.accepted)
                claimed = finished.claims.jobs


def producer() -> None:
    """Enqueues numbered jobs until it is told to stop, and says how many."""
    from djqueue.testing.factories import enqueue

    with storage(connect=False) as made:
        stopped = threading.Event()
        say("ready")
        threading.Thread(target=lambda: (sys.stdin.readline(), stopped.set()), daemon=True).start()
        number = 0
        while not stopped.is_set():
            enqueue(made, id=f"job-{number}")
            number += 1
            if number == 1:
                say("started")
        say(number)


def interrupted() -> None:
    """Is killed in the middle of a transaction."""
    from djqueue.storage.database import enqueue
    from djqueue.testing.factories import batch

    def work(tx):
        enqueue.enqueue(tx, [batch(3)])
        say("inside")
        sys.stdin.readline()

    with storage() as made:
        made.database.write(work)


def buffered() -> None:
    """Enqueues jobs that are written a moment later, and ends without closing its storage."""
    from djqueue.storage.database import DatabaseStorage
    from djqueue.testing.factories import batch

    made = DatabaseStorage()
    made.enqueue([batch(3, durable=False)])
    say("enqueued")


def forker() -> None:
    """Forks a child with a connected storage; both go on using it."""
    from djqueue.testing.factories import enqueue

    with storage() as made:
        woken = threading.Event()
        made.listen(None, woken.set)
        enqueue(made, id="before")
        child = os.fork()
        if not child:
            enqueue(made, id="child")
            say("child", made.database.connections.is_open)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        enqueue(made, id="parent")
        say("parent", made.database.connections.is_open, status)


def memory() -> None:
    """Uses a database in memory, which exists in one connection only."""
    from django.core.management import call_command
    from django.db import connections

    from djqueue.testing.factories import QUEUE, claim_ids, enqueue
    from djqueue.testing.waiting import Recorder

    connections.settings["memory"] = {**connections.settings["default"], "NAME": ":memory:"}
    call_command("migrate", database="memory", verbosity=0)
    with storage(database="memory") as made:
        recorder = Recorder()
        made.events.subscribe(QUEUE, recorder)
        enqueue(made, id="a", durable=False)
        say(claim_ids(made), recorder.words(), threading.active_count())


def killed_upgrade(settings: str, at: str) -> None:
    """Upgrades a database of the former storage, and stops in the middle."""
    import json

    from django.core.management import call_command
    from django.test import override_settings

    from djqueue.storage.database import snapshots, upgrade
    from djqueue.storage.tables import schema
    from tests.storage.database.upgrade.former import using

    owner, name = {
        "tables": (schema.Migration, "apply"),
        "reading": (upgrade.FormerReader, "_add_belongings"),
        "writing": (snapshots.TableRestore, "_write_jobs"),
    }[at]
    done = getattr(owner, name)

    def stop(*args, **kwargs):
        done(*args, **kwargs)
        say("here")
        sys.stdin.readline()

    setattr(owner, name, stop)
    with override_settings(DJQUEUE={"BACKUP": None}), using(json.loads(settings)):
        call_command("djqueue", "upgrade", "--no-input")


if __name__ == "__main__":
    django.setup()
    globals()[sys.argv[1]](*sys.argv[2:])
