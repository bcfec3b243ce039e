"""The claims and outcomes of this process's workers that a new scheduler may not know."""

import threading
from collections.abc import Sequence

from djqueue.core.job import Claimed, ClaimRequest, Finished, Outcome

HeldAttempt = tuple[str, Claimed, Outcome | None]


class AttemptLedger:
    """Attempts from their claim until their outcome is on disk, by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, Claimed]] = {}
        self._kept: dict[int, tuple[str, Claimed, Outcome, int]] = {}
        """Ended attempts, with the generation of changes that their outcomes are in."""
        self._failed: list[int] = []
        self._number = 0
        self._is_new = False

    def begin(self) -> tuple[int, list[int]]:
        """Return the number of the next call, and the numbers of those that had no answer."""
        with self._lock:
            self._number += 1
            failed, self._failed = self._failed, []
            return self._number, failed

    def gave_up(self, number: int, failed: Sequence[int]) -> None:
        """Record that a call had no answer."""
        with self._lock:
            self._failed += [*failed, number]

    def answered(
        self,
        outcomes: Sequence[Outcome],
        then: ClaimRequest | None,
        finished: Finished,
        generation: int,
        written: int,
    ) -> None:
        """Record an answer: the outcomes that are kept until they are written, and the new claims."""
        with self._lock:
            if self._is_new:
                # The scheduler answers calls after it has applied what was announced.
                self._kept = {token: (*kept[:3], generation) for token, kept in self._kept.items()}
                self._is_new = False
            for token in [token for token, kept in self._kept.items() if kept[3] <= written]:
                del self._kept[token]
            for outcome, is_accepted in zip(outcomes, finished.accepted, strict=True):
                held = self._held.pop(outcome.token, None)
                if is_accepted and held is not None and generation > written:
                    self._kept[outcome.token] = (*held, outcome, generation)
            if then is not None:
                for claimed in finished.claims.jobs:
                    self._held[claimed.token] = then.worker, claimed

    def lost(self, tokens: Sequence[int]) -> None:
        """Forget claims that the scheduler has ended."""
        with self._lock:
            for token in tokens:
                self._held.pop(token, None)

    def all(self) -> list[HeldAttempt]:
        """Return the attempts that a new scheduler has to know."""
        with self._lock:
            running: list[HeldAttempt] = [(worker, claimed, None) for worker, claimed in self._held.values()]
            return running + [kept[:3] for kept in self._kept.values()]

    def restarted(self) -> None:
        """Expect answers of a new scheduler, whose generations begin anew."""
        with self._lock:
            self._is_new = True
            self._failed = []
