"""The group mode that is recorded with each queue, and the overrides of its groups."""

from djqueue.core.engine import Engine
from djqueue.core.groups import NO_LIMIT
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.groups import recorded_modes, row_of

from .journal import DatabaseJournal


class GroupModes:
    """Checks the configured modes of queues against the recorded ones, and has both written."""

    def __init__(self, alias: str, engine: Engine, journal: DatabaseJournal) -> None:
        self._alias = alias
        self._engine = engine
        self._journal = journal
        self._recorded: set[str] = set()

    def agree(self, queue: str) -> None:
        """Check that the queue is used in its recorded mode; record the configured one if there is none.

        Raises ConfigurationError.
        """
        if queue in self._recorded:
            return
        with named(self._alias):
            mode = recorded_modes(self._alias, [queue]).get(queue)
        if mode is not None:
            self._engine.context.policy(queue).check_mode(queue, mode)
        else:
            self.note_group(queue, None)
        self._recorded.add(queue)

    def accept(self, *queues: str) -> None:
        """Check these queues no more."""
        self._recorded.update(queues)

    def are_known(self, *queues: str) -> bool:
        """Return whether none of these queues needs a check."""
        return self._recorded.issuperset(queues)

    def forget(self, queue: str) -> None:
        """Check a queue again: what was recorded is deleted."""
        self._recorded.discard(queue)

    def note_group(self, queue: str, group: str | None) -> None:
        """Write the overrides of a group to the journal.

        With None, write the default for groups without their own limit, and the mode.
        """
        overrides = self._engine.queues.group_limits(queue).get(group, NO_LIMIT)
        mode = self._engine.context.policy(queue).group_mode if group is None else ""
        self._journal.group_changed((queue, group or ""), row_of(queue, group, overrides, mode))
