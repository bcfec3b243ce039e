"""Work on a thread beside a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def beside(run: Callable[[Event], object], name: str, patience: float | None = None) -> Iterator[None]:
    """Context manager: call a function on a daemon thread within the block.

    Args:
        run: Gets an event that is set at the end of the block, and should then return.
        name: Name of the thread.
        patience: Maximum seconds to wait for the thread at the end; None waits until it has ended.
    """
    stop = Event()
    thread = Thread(target=run, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patience)
