"""What wakes the claim loop: nothing that rings between a look and going to sleep is lost."""

import asyncio
from enum import IntEnum


class WakeOn(IntEnum):
    """What a sleeper wants to be woken by."""

    ALL = 0
    ENDINGS = 1
    """Ended runs and the worker's end; jobs that came have to wait, all slots being taken."""
    STOP = 2
    """The worker's end only, while the storage is left in peace."""


class WakeEvent:
    """One sleeper, the claim loop; anybody may ring, from any thread, at any time.

    A ring sets a flag first and looks for a sleeper then; the sleeper lies down first and looks at the
    flags then: one of the two sees the other. While nobody sleeps, ringing costs next to nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sleeper: asyncio.Future[None] | None = None
        self._hearing = WakeOn.ALL
        self._called = False
        self._jobs = self._endings = self._stop = False

    def jobs_came(self) -> None:
        """Jobs may be claimable. From any thread."""
        self._jobs = True
        if self._hearing is WakeOn.ALL:
            self._call()

    def run_ended(self) -> None:
        """A run has ended. From any thread."""
        if not self._endings:
            self._endings = True
            if self._hearing is not WakeOn.STOP:
                self._call()

    def run_ended_here(self) -> None:
        """A run has ended. From the loop itself: spares the way through its pipe."""
        if not self._endings:
            self._endings = True
            if self._hearing is not WakeOn.STOP:
                self._rouse()

    def stop(self) -> None:
        """The worker is to end, or to hurry. From any thread."""
        self._stop = True
        self._call()

    async def sleep(self, seconds: float | None, hearing: WakeOn) -> None:
        """Sleep until something rings that is to be heard, `seconds` at most (None: no limit)."""
        self._called = False
        self._hearing = hearing
        sleeper = self._sleeper = self._loop.create_future()
        timer = None
        try:
            if self._has_rung(hearing):
                # The loop's other tasks have their turn all the same.
                await asyncio.sleep(0)
            else:
                if seconds is not None:
                    timer = self._loop.call_later(seconds, self._rouse)
                await sleeper
        finally:
            if timer is not None:
                timer.cancel()
            self._sleeper = None
            if hearing is WakeOn.ALL:
                self._jobs = False
            if hearing is not WakeOn.STOP:
                self._endings = False
            self._stop = False

    def _has_rung(self, hearing: WakeOn) -> bool:
        if self._stop:
            return True
        if hearing is WakeOn.STOP:
            return False
        return self._endings or (self._jobs and hearing is WakeOn.ALL)

    def _call(self) -> None:
        if self._sleeper is None or self._called:
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._rouse)
        except RuntimeError:
            # The loop has been closed: nobody sleeps there any more.
            self._sleeper = None

    def _rouse(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
