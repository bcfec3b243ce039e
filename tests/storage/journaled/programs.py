"""What child processes do: `python -m tests.storage.journaled.programs NAME ARGUMENTS…`.

They say what they have done on standard output, a line each, and are told what to do on standard input.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import django

from tests.support import PATIENCE

QUEUE = "default"


def say(*words: object) -> None:
    # One write: it is heard whole or not at all, whenever this process dies.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def commands() -> Iterator[list[str]]:
    for line in sys.stdin:
        yield line.split()


@contextmanager
def storage(*, connect: bool = False, standby: str = "wait"):
    from djqueue.storage.journaled import JournaledStorage

    with closing(JournaledStorage(scheduler_lease=float(os.environ.get("LEASE", 10)))) as made:
        made.role.standby = standby
        if connect:
            made.connect()
        yield made


def scheduler() -> None:
    """Is the scheduler until it hears that there is nothing more to do."""
    with storage(connect=True) as made:
        made.role.on_lost = lambda: say("lost")
        say("ready")
        for command in commands():
            obey(made, command)


def client() -> None:
    """Obeys, without being the scheduler."""
    with storage() as made:
        say("ready")
        for command in commands():
            obey(made, command)


def obey(made, command: list[str]) -> None:
    from djqueue.core.errors import StorageUnavailableError

    try:
        do(made, command)
    except StorageUnavailableError as error:
        say("refused", error)


def do(made, command: list[str]) -> None:
    from djqueue.core.job import Outcome
    from djqueue.testing.factories import batch, claim, completing, finish

    match command:
        case ["enqueue", count, *options]:
            given = {name: _value(value) for name, value in (option.split("=") for option in options)}
            if "id" in given:
                given["ids"] = [given.pop("id")]
            for result in made.enqueue([batch(int(count), **given)]):
                say(result.status, result.id)
            say("done")
        case ["work", count]:
            claimed = claim(made, int(count))
            for one in claimed:
                say(one.id)
            say("done", *finish(made, *map(completing, claimed)))
        case ["claim", count]:
            for one in claim(made, int(count)):
                say(one.id)
            say("done")
        case ["finish", job_id, token]:
            say("done", *finish(made, Outcome(QUEUE, job_id, int(token), "complete")))
        case ["sync"]:
            made.reads.counts(QUEUE)
            say("done")
        case ["cancel", job_id]:
            say(made.jobs.cancel(QUEUE, [job_id])[0].status)


def _value(text: str):
    return {"True": True, "False": False, "None": None}.get(text, text)


def enqueuer(durable: str) -> None:
    """The scheduler, which enqueues numbers until it dies, and says each once the call has returned."""
    from djqueue.testing.factories import enqueue

    with storage(connect=True) as made:
        say("ready")
        number = 0
        while True:
            enqueue(made, payload=str(number).encode(), durable=_value(durable))
            say(number)
            number += 1


def transactional_enqueuer() -> None:
    """A client that enqueues numbers in transactions, every third of which it rolls back."""
    from django.db import transaction

    from djqueue.testing.factories import enqueue

    with storage() as made:
        say("ready")
        number = 0
        while True:
            try:
                with transaction.atomic():
                    enqueue(made, payload=str(number).encode())
                    if number % 3 == 2:
                        raise _RollBackError
            except _RollBackError:
                pass
            else:
                say(number)
            number += 1


class _RollBackError(Exception):
    pass


def worker() -> None:
    """The scheduler, which works at jobs until it dies, and says each turn: some fail, some are put back, new
    ones come."""
    from djqueue.testing.factories import batch, completing, failing, request, retrying

    with storage(connect=True) as made:
        say("ready")
        turn = 0
        claims = made.claim(request(7))
        while True:
            turn += 1
            outcomes = []
            for at, claimed in enumerate(claims.jobs):
                if claimed.payload == b"fails":
                    outcomes.append(failing(claimed))
                elif (turn + at) % 5 == 0 and claimed.failures < 2:
                    outcomes.append(retrying(claimed))
                else:
                    outcomes.append(completing(claimed))
            claims = made.finish(outcomes, request(7)).claims
            if turn % 3 == 0:
                made.enqueue([batch(2, durable=turn % 2 == 0)])
            say(turn)


def contender() -> None:
    """Tries to become the scheduler, and says when it is and when it no longer is."""
    from djqueue.core.errors import SchedulerRunningError

    say("ready")
    for _ in commands():
        try:
            with storage(connect=True, standby="never") as made:
                say("scheduler", made.lease._generation)
                sys.stdin.readline()
            say("closed")
        except SchedulerRunningError as error:
            say("refused", error)


def forker() -> None:
    """The scheduler, and the producer that it becomes the parent of."""
    from django.db import connection

    from djqueue.testing.factories import enqueue

    with storage(connect=True) as made:
        enqueue(made, id="parent")
        connection.close()
        child = os.fork()
        if not child:
            say(enqueue(made, id="child"), enqueue(made, id="durable", durable=True), made.is_scheduler)
            os._exit(0)
        say(os.waitpid(child, 0)[1], made.is_scheduler)
        for command in commands():
            obey(made, command)


def publisher() -> None:
    """A client that publishes what was put aside, chunk by chunk, and says each when it is published."""
    from djqueue.storage.staging import chunks_of
    from tests.storage.journaled.test_staging import MANIFEST

    with storage() as made:
        staging = made.capabilities.staging
        found = staging.begin(MANIFEST, None)
        say("ready")
        for chunk in chunks_of(found.manifest):
            say(staging.publish(found.manifest, [chunk])[0].queued)
        staging.end(found.manifest)


def waiter() -> None:
    """A client that enqueues a job and waits for what it returns."""
    from djqueue.client import Queue

    with storage() as made:
        say("ready")
        for [wait] in commands():
            say(Queue(QUEUE, storage=made).enqueue_and_wait("question", name="handler", wait=float(wait)))


def be_patient(patch: Callable[[object, str, object], None]) -> None:
    """Lengthen the deadlines after which a client gives up a scheduler that does not answer."""
    from djqueue.storage.journaled import JournaledStorage, connecting, probing, remote, session

    for module, name in (
        (connecting, "CONNECT_TIMEOUT"),
        (probing, "PROBE_TIMEOUT"),
        (remote, "PING_TIMEOUT"),
        (remote, "PROBE_TIMEOUT"),
        (remote, "READ_TIMEOUT"),
        (remote, "SEND_TIMEOUT"),
        (session, "FIRST_FRAME"),
    ):
        patch(module, name, PATIENCE)
    for function in (JournaledStorage.__init__, remote.Remote.read):
        patch(function, "__kwdefaults__", {**function.__kwdefaults__, "timeout": PATIENCE})


if __name__ == "__main__":
    django.setup()
    be_patient(setattr)
    globals()[sys.argv[1]](*sys.argv[2:])
