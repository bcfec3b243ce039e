"""Values of the labels of metrics, limited in number."""

from collections.abc import Iterable, Sequence

from djqueue.core.metrics import OTHERS

MAX_QUEUES = 50
"""Maximum number of queues with labels of their own."""
MAX_JOBS = 50
"""Maximum number of job names of queues with labels of their own."""
OTHER = "other"
"""Label of all other queues, and of all other jobs of a queue."""


class Labels:
    """Labels of queues and jobs.

    The same names always get the same labels, in every process and after every restart, so that counters
    only rise. Queues of the settings come first, then the others by name.

    queues: all queues.
    configured: queues of the settings.
    jobs: queues and names of jobs.
    """

    def __init__(
        self, queues: Iterable[str], configured: Sequence[str], jobs: Iterable[tuple[str, str]]
    ) -> None:
        known = set(queues) | set(configured)
        ordered = [*dict.fromkeys(configured), *sorted(known.difference(configured))]
        self._places = {name: place for place, name in enumerate(ordered[:MAX_QUEUES])}
        named = {(queue, name) for queue, name in jobs if queue in self._places and name != OTHERS}
        self._jobs = set(sorted((self._places[queue], name) for queue, name in named)[:MAX_JOBS])

    def queue(self, name: str) -> str:
        """Return the label of a queue."""
        return printable(name) if name in self._places else OTHER

    def job(self, queue: str, name: str) -> str:
        """Return the label of a job's name in its queue."""
        return printable(name) if (self._places.get(queue), name) in self._jobs else OTHER


def printable(name: str) -> str:
    """Return a name as valid Unicode: names from file names may have lone surrogates."""
    return name.encode(errors="replace").decode()
