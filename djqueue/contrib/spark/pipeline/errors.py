"""What Spark raises, in few words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from djqueue.core.errors import DjqueueError, OptionError

OURS = re.compile(r"^(?:djqueue\.[\w.]+\.)?(\w+Error): (.+)$", re.MULTILINE)
LONGEST = 2_000


class SparkError(DjqueueError):
    """Spark could not do it."""


@contextmanager
def plainly() -> Iterator[None]:
    """Around what Spark does: what it raises comes as OptionError or SparkError, with the reason alone."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise reason_of(str(error)) from error


def reason_of(text: str) -> DjqueueError:
    """What a text of Spark's is about, which may have a traceback of Python's, and a stack of Java's."""
    found = OURS.findall(text)
    if found:
        # The last is the first that was raised, in the process where it was.
        name, reason = found[-1]
        return OptionError(reason) if name == OptionError.__name__ else SparkError(reason)
    return SparkError(text.partition("\nJVM stacktrace")[0].strip()[:LONGEST])
