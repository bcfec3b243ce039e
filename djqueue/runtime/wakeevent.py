"""The event that wakes the claim loop. A wake-up between a check and the following sleep is not lost."""

import asyncio
from enum import IntEnum


class WakeOn(IntEnum):
    """Which wake-ups end a sleep."""

    ALL = 0
    ENDINGS = 1
    """Ended runs and the worker's stop; new jobs wait, because all slots are in use."""
    STOP = 2
    """The worker's stop only, while the storage is unavailable."""


class WakeEvent:
    """Wakes one sleeper, the claim loop. Any thread may set it at any time.

    Setting the event first sets a flag and then checks for a sleeper; the sleeper first registers itself and
    then checks the flags. So one of them notices the other. Without a sleeper, setting costs almost nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sleeper: asyncio.Future[None] | None = None
        self._wake_on = WakeOn.ALL
        self._called = False
        self._jobs = self._endings = self._stop = self._is_over = False

    def jobs_came(self) -> None:
        """Wake the loop because jobs may be claimable. From any thread."""
        self._jobs = True
        if self._wake_on is WakeOn.ALL:
            self._call()

    def run_ended(self) -> None:
        """Wake the loop because a run has ended. From any thread."""
        if not self._endings:
            self._endings = True
            if self._wake_on is not WakeOn.STOP:
                self._call()

    def run_ended_here(self) -> None:
        """Wake the loop because a run has ended. Cheaper than `run_ended`, and on the loop only."""
        if not self._endings:
            self._endings = True
            if self._wake_on is not WakeOn.STOP:
                self._wake()

    def clear_endings(self) -> None:
        """Ignore the runs that have ended so far: the claim loop looks at them now, without a sleep."""
        self._endings = False

    def stop(self) -> None:
        """Wake the loop because the worker stops or hurries. From any thread."""
        self._stop = True
        self._call()

    async def sleep(self, seconds: float | None, wake_on: WakeOn) -> bool:
        """Sleep until one of the given wake-ups, at most `seconds` (None: no limit).

        Returns False if nothing but the end of runs or exchanges has ended it.
        """
        self._called = self._is_over = False
        self._wake_on = wake_on
        sleeper = self._sleeper = self._loop.create_future()
        timer = None
        try:
            if self._is_set(wake_on):
                # Let the other tasks of the loop run in any case.
                await asyncio.sleep(0)
            else:
                if seconds is not None:
                    timer = self._loop.call_later(seconds, self._end)
                await sleeper
            return self._jobs or self._is_over or not self._endings
        finally:
            if timer is not None:
                timer.cancel()
            self._sleeper = None
            if wake_on is WakeOn.ALL:
                self._jobs = False
            if wake_on is not WakeOn.STOP:
                self._endings = False
            self._stop = False

    def _is_set(self, wake_on: WakeOn) -> bool:
        if self._stop:
            return True
        if wake_on is WakeOn.STOP:
            return False
        return self._endings or (self._jobs and wake_on is WakeOn.ALL)

    def _call(self) -> None:
        if self._sleeper is None or self._called:
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            # The loop is closed, and its sleeper is gone.
            self._sleeper = None

    def _end(self) -> None:
        """End the sleep because its time is over."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
