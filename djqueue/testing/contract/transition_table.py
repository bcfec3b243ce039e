"""The transition table and this suite agree."""

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import QUEUE, enqueue
from .case import StorageCase, recorded
from .transitions import TransitionLog, marks_of_class, table


class TransitionTableContract(StorageCase):
    """Cases about the suite itself."""

    def test_every_transition_of_the_table_has_a_case(self) -> None:
        shown = marks_of_class(type(self))

        assert table() - shown == set()

    def test_every_case_shows_a_transition_of_the_table(self) -> None:
        shown = marks_of_class(type(self))

        assert shown - table() == set()

    def test_queued_event_has_the_initial_state_of_the_job(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            enqueue(storage, id="waiting")
            enqueue(storage, id="delayed", delay=1_000_000)
            enqueue(storage, id="blocked", depends_on=((QUEUE, "waiting"),))
            recorder.until("enqueued", "blocked")
            log = TransitionLog()
            log.follow(recorder.events())

        assert log.outside == []
        assert [event.state for event in recorder.events()] == [
            State.WAITING,
            State.DELAYED,
            State.BLOCKED,
        ]
