"""How long, and how many, records of ended jobs a queue keeps at most."""

from dataclasses import dataclass

from .states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Bounds for the records of jobs with one outcome; None is no bound but the job's own times."""

    age: int | None = None
    """Milliseconds from a job's end."""
    count: int | None = None
    """Records; those whose time would be over first go first."""

    def shorten(self, kept: int | None) -> int | None:
        """Milliseconds for which a record is kept whose job says `kept`; None is for ever."""
        if self.age is None:
            return kept
        return self.age if kept is None else min(kept, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Bounds by outcome. Failed jobs are kept by their dead letters: see `DeadLetterPolicy`."""

    completed: Keep = Keep()
    cancelled: Keep = Keep()

    def of(self, state: State) -> Keep:
        """The bounds for jobs that ended in this state."""
        return self.completed if state is State.COMPLETED else self.cancelled


NO_RETENTION = Retention()
"""As long as each job says."""
