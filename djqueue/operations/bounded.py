"""Runs work that may hang beside its caller, who waits for it only as long as it wants to."""

from collections.abc import Callable
from threading import Event, Thread

from django.db import connections


def is_in_transaction() -> bool:
    """Return whether this thread has a transaction, whose rows no other thread can see."""
    return any(connection.in_atomic_block for connection in connections.all(initialized_only=True))


def start(work: Callable[[], object], name: str) -> Event:
    """Start work on a daemon thread, and return the event of its end.

    A call to a frozen PostgreSQL server has no time limit of its own. Inside a transaction of the caller, as
    in a `TestCase`, the work runs in the caller's thread.
    """
    done = Event()

    def run_alone() -> None:
        try:
            work()
        finally:
            connections.close_all()
            done.set()

    if is_in_transaction():
        try:
            work()
        finally:
            done.set()
    else:
        Thread(target=run_alone, name=name, daemon=True).start()
    return done
