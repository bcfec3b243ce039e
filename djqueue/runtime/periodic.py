"""A thread that does one thing again and again."""

from collections.abc import Callable
from threading import Event, Thread


class Periodic:
    """Calls `action` every `interval()` seconds, in a thread of its own, until it is stopped."""

    def __init__(
        self,
        name: str,
        interval: Callable[[], float],
        action: Callable[[], None],
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        self._interval = interval
        self._action = action
        self._on_exit = on_exit
        self._called = Event()
        self._stopped = False
        self._thread = Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first call comes after one interval."""
        self._thread.start()

    def hasten(self) -> None:
        """Have the next call made now, and the interval asked for anew."""
        self._called.set()

    def stop(self) -> None:
        """Let the thread end after the call that it is in, if any."""
        self._stopped = True
        self._called.set()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, `timeout` seconds at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _serve(self) -> None:
        try:
            while True:
                self._called.wait(self._interval())
                self._called.clear()
                if self._stopped:
                    return
                self._action()
        finally:
            if self._on_exit is not None:
                self._on_exit()
