"""The wait of a failed job before its next attempt."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

from .errors import OptionError
from .messages import shown
from .units import MAX_DURATION, milliseconds

KINDS = ("fixed", "linear", "exponential")
KEYS = ("kind", "base", "factor", "cap", "jitter")
"""Keys of a backoff that is given as a mapping."""

BackoffFunction = Callable[[int, BaseException], float | timedelta]
"""(failures so far, the exception) -> seconds: a custom backoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Rule for the wait before the next attempt.

    Args:
        kind: `fixed` waits `base`; `linear` waits `base` × failures; `exponential` waits
            `base` × `factor` ^ (failures - 1).
        base: milliseconds.
        factor: for the exponential kind.
        cap: maximum wait in milliseconds.
        jitter: 0 to 1: the maximum share of the wait that is randomly added or subtracted, so that jobs that
            failed together do not come back together.
    """

    kind: str = "exponential"
    base: int = 1_000
    factor: float = 2.0
    cap: int = 3_600_000
    jitter: float = 0.1

    def delay(self, failures: int, random: Random) -> int:
        """Return the milliseconds to wait after a failure; the first one has number 1."""
        if self.kind == "fixed":
            wait: float = self.base
        elif self.kind == "linear":
            wait = self.base * failures
        else:
            # 2 ** 1024 exceeds the range of a float; every cap is below.
            exponent = min((failures - 1) * math.log2(self.factor), 60.0) if self.factor > 0 else 0.0
            wait = self.base * 2.0**exponent
        wait = min(wait, self.cap)
        if self.jitter:
            wait += wait * self.jitter * (2 * random.random() - 1)
        return min(max(0, round(wait)), self.cap)


DEFAULT_BACKOFF = Backoff()


def parse_backoff(value: Any) -> Backoff:
    """Return the backoff for a value that users write: seconds, a timedelta, a kind, a mapping, or a
    `Backoff`.
    """
    if isinstance(value, Backoff):
        return _checked(value)
    if isinstance(value, str):
        return _checked(Backoff(kind=value))
    if isinstance(value, (int, float, timedelta)) and not isinstance(value, bool):
        return Backoff(kind="fixed", base=milliseconds("backoff", value), jitter=0.0)
    if isinstance(value, dict):
        if unknown := set(value) - set(KEYS):
            raise OptionError(
                f"backoff: unknown key {min(unknown, key=str)!r}; the keys are {', '.join(KEYS)}"
            )
        times = {key: milliseconds(f"backoff.{key}", value[key]) for key in ("base", "cap") if key in value}
        return _checked(Backoff(**{**value, **times}))
    raise OptionError(
        f"backoff: expected seconds, one of {', '.join(KINDS)}, a mapping or a Backoff, got {shown(value)}"
    )


def _checked(backoff: Backoff) -> Backoff:
    if backoff.kind not in KINDS:
        raise OptionError(f"backoff: {shown(backoff.kind)} is not one of {', '.join(KINDS)}")
    for name, low, high in (("factor", 1.0, 1e6), ("jitter", 0.0, 1.0)):
        number = getattr(backoff, name)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not low <= number <= high:
            raise OptionError(
                f"backoff.{name}: must be a number from {low:g} to {high:g}; got {shown(number)}"
            )
    for name in ("base", "cap"):
        wait = getattr(backoff, name)
        if isinstance(wait, bool) or not isinstance(wait, int) or not 0 <= wait <= MAX_DURATION:
            raise OptionError(f"backoff.{name}: must be from 0 to {MAX_DURATION} milliseconds; got {wait!r}")
    return backoff
