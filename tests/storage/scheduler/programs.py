"""What child processes run: `python -m tests.storage.scheduler.programs NAME ARGUMENTS…`.

They write what they have done to standard output, and read what to do from standard input.
"""

import os
import signal
import sys
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


@contextmanager
def storage(folder: str, *, here: bool = False, timeout: float = 30.0):
    from djqueue.storage.scheduler import SchedulerStorage

    with closing(SchedulerStorage(folder=folder, timeout=timeout)) as made:
        if here:
            made.role.starts_here = True
            made.connect()
        yield made


def scheduler(folder: str, die_at: str = "0") -> None:
    """The scheduler, until standard input ends, or killed before a number of changes of its tables."""
    from djqueue.storage.scheduler import changes

    left = int(die_at)
    apply = changes.TableChange.apply

    def dying(change, dialect):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        apply(change, dialect)

    changes.TableChange.apply = dying  # type: ignore[method-assign]
    with storage(folder, here=True) as made:
        say("ready")
        for line in sys.stdin:
            if line.strip() == "written":
                made.scheduler.journal.wait()
            say("done")
    say("changes", int(die_at) - left)


def commands() -> Iterator[list[str]]:
    say("ready")
    for line in sys.stdin:
        yield line.split()
        say("done")


def worker(folder: str) -> None:
    """A worker that obeys."""
    from djqueue.core.errors import StorageUnavailableError
    from djqueue.testing.factories import claim, completing, finish

    with storage(folder) as made:
        made.listen(None, lambda: None)
        held = {}
        for command in commands():
            try:
                match command:
                    case ["claim", count]:
                        for claimed in claim(made, int(count)):
                            held[claimed.id] = claimed
                            say("claimed", claimed.id)
                    case ["complete", job_id]:
                        [accepted] = finish(made, completing(held[job_id]))
                        say("accepted" if accepted else "refused", job_id)
                        held.pop(job_id)
            except StorageUnavailableError as error:
                say("unavailable", error)


if __name__ == "__main__":
    django.setup()
    globals()[sys.argv[1]](*sys.argv[2:])
