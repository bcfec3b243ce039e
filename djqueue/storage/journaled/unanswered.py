"""Ends of attempts that were accepted while their worker received no answer: it reports them again."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from django.db import connections

from djqueue.core.clock import Clock
from djqueue.core.engine import Engine
from djqueue.core.job import Finished, Lease, Outcome

from . import recovery

TTL = 600_000
"""Milliseconds for which an accepted end is remembered."""
LIMIT = 10_000
"""Accepted ends that are remembered at most."""


class UnansweredEnds:
    """Claims whose ends were accepted, with the monotonic milliseconds of that, oldest first."""

    def __init__(self, alias: str, engine: Engine, clock: Clock) -> None:
        self._alias = alias
        self._engine = engine
        self._clock = clock
        self.claims: dict[Lease, int] = {}

    def note(self, accepted: Iterable[Lease]) -> None:
        """Remember claims whose worker did not hear that their ends were accepted."""
        now = self._clock.monotonic()
        noted = self.claims
        for claim in accepted:
            noted.pop(claim, None)
            noted[claim] = now
        while noted:
            oldest = next(iter(noted))
            if len(noted) <= LIMIT and now - noted[oldest] < TTL:
                break
            del noted[oldest]

    async def recognize(self, outcomes: Sequence[Outcome], finished: Finished) -> Finished:
        """Accept outcomes that were refused because they, or the scheduler before this one, had been
        accepted.

        That scheduler may have written an end and died before it answered.
        """
        if all(finished.accepted):
            return finished
        return accept_also(outcomes, finished, await self._known(outcomes, finished))

    async def _known(self, outcomes: Sequence[Outcome], finished: Finished) -> set[Lease]:
        refused = {claim_of(outcome) for outcome in outcomes} - accepted_claims(outcomes, finished)
        # They stay noted: the answer to this retry may be lost, too.
        known = refused & self.claims.keys()
        earlier: dict[str, list[str]] = {}
        for claim in refused:
            if claim.token < self._engine.context.least_token:
                earlier.setdefault(claim.queue, []).append(claim.id)
        if earlier:
            known |= refused & await asyncio.to_thread(self._written_claims, earlier)
        return known

    def _written_claims(self, ids: Mapping[str, Sequence[str]]) -> set[Lease]:
        try:
            return written_claims(self._alias, ids)
        finally:
            connections[self._alias].close()


def written_claims(alias: str, ids: Mapping[str, Sequence[str]]) -> set[Lease]:
    """Return the claims of these jobs, by queue, whose ends are in the tables."""
    return {claim for queue, mine in ids.items() for claim in recovery.ended_claims(alias, queue, mine)}


def accept_also(outcomes: Sequence[Outcome], finished: Finished, known: set[Lease]) -> Finished:
    """Return an answer that also accepts the outcomes of some claims."""
    if not known:
        return finished
    pairs = zip(outcomes, finished.accepted, strict=True)
    return finished._replace(
        accepted=[is_accepted or claim_of(outcome) in known for outcome, is_accepted in pairs]
    )


def accepted_claims(outcomes: Sequence[Outcome], finished: Finished) -> set[Lease]:
    """Return the claims whose ends were accepted."""
    pairs = zip(outcomes, finished.accepted, strict=True)
    return {claim_of(outcome) for outcome, is_accepted in pairs if is_accepted}


def claim_of(outcome: Outcome) -> Lease:
    """Return the claim that an outcome ends."""
    return Lease(outcome.queue, outcome.id, outcome.token)
