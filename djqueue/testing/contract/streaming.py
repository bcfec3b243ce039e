"""Streaming: items emitted by attempts, read in order from the first one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event as ThreadEvent
from threading import Thread
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue.client.streaming import Streaming
from djqueue.codecs import MSGPACK, encode
from djqueue.core.errors import (
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    MaxRetriesError,
    ResultTimeoutError,
    StreamRestartedError,
)
from djqueue.core.job import Claimed, ItemMark
from djqueue.core.pages import PAGE_BYTES
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    QUEUE,
    a_completed_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_one,
    completing,
    emission_of,
    emit,
    enqueue,
    failing,
    finish,
    items_of,
    job,
    page_of,
    releasing,
    retrying,
    state,
)
from ..waiting import PATIENCE
from .case import LATER, SOON, StorageCase, nothing_changes, recorded, so_far, swept_clean

VALUES = [None, False, 0, "", "text", [1, {"two": 2}], b"\0bytes", 1.5]
FOREIGN = 1 << 40
"""A token that no claim has."""


def encoded(*values: Any) -> list[bytes]:
    """Values as a worker sends them."""
    return [encode(value, MSGPACK) for value in values]


# The storage is one for all examples, and each storage's class runs the same test.
ONE_STORAGE_FOR_ALL = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


class StreamingContract(StorageCase):
    """Cases about what a run sends beside its result, and who reads it."""

    # What is kept.

    def test_items_are_read_in_order(self, storage: Storage) -> None:
        run = an_active_job(storage)

        assert emit(storage, run, b"one")
        assert emit(storage, run, b"two", b"", start=1)

        page = page_of(storage, run.id)
        assert (page.state, page.items, page.start, page.sent) == (State.ACTIVE, (b"one", b"two", b""), 0, 3)
        assert page.content_type == MSGPACK

    def test_items_after_a_mark_are_read(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one", b"two", b"three")
        token = page_of(storage, run.id).run

        page = page_of(storage, run.id, token, 2)

        assert (page.run, page.start, page.items, page.sent) == (token, 2, (b"three",), 3)
        assert page_of(storage, run.id, token, 3).items == ()

    def test_mark_of_another_attempt_reads_from_the_start(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one", b"two")

        page = page_of(storage, run.id, FOREIGN, 1)

        assert (page.start, page.items) == (0, (b"one", b"two"))

    def test_items_of_several_jobs_are_emitted_and_read_in_one_call(self, storage: Storage) -> None:
        one, two, three = (an_active_job(storage, id=name) for name in "abc")
        other = an_active_job(storage, queue="other")
        stale = emission_of(two, 0, b"no")._replace(token=FOREIGN)

        accepted = storage.emit(
            [emission_of(one, 0, b"1", b"2"), stale, emission_of(three, 0, b"3"), emission_of(other, 0, b"4")]
        )

        assert accepted == [True, False, True, True]
        pages = storage.reads.items(QUEUE, [ItemMark(name) for name in ("a", "b", "c", "nobody")])
        assert [page and page.items for page in pages] == [(b"1", b"2"), (), (b"3",), None]
        assert items_of(storage, other.id, "other") == [b"4"]

    def test_job_record_has_the_number_of_items(self, storage: Storage) -> None:
        run = an_active_job(storage)
        assert job(storage, run.id).items == 0
        emit(storage, run, b"one", b"two")
        assert job(storage, run.id).items == 2

        finish(storage, completing(run))

        assert job(storage, run.id).items == 2

    def test_items_emitted_twice_are_stored_once(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one", b"two")

        assert emit(storage, run, b"one", b"two")
        assert emit(storage, run, b"two", b"three", start=1)

        assert items_of(storage, run.id) == [b"one", b"two", b"three"]

    def test_items_after_a_gap_are_rejected(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")

        assert not emit(storage, run, b"three", start=2)

        assert items_of(storage, run.id) == [b"one"]

    def test_emitting_no_items_changes_nothing(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")

        with nothing_changes(storage):
            assert emit(storage, run, start=1)

        assert items_of(storage, run.id) == [b"one"]

    @pytest.mark.parametrize("how", [completing, retrying, releasing, failing, cancelling])
    def test_ended_attempt_cannot_emit_items(self, storage: Storage, how: Callable[[Claimed], Any]) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")
        finish(storage, how(run))

        with nothing_changes(storage):
            assert not emit(storage, run, b"two", start=1)

    def test_attempt_with_lost_lease_cannot_emit_items(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")
        self.lose_lease(storage, run.lease)

        assert not emit(storage, run, b"two", start=1)

        again = claim_one(storage)
        assert not emit(storage, run, b"two", start=1)
        assert not emit(storage, run, b"one")
        assert emit(storage, again, b"new")
        assert items_of(storage, run.id) == [b"new"]

    @pytest.mark.parametrize("size", [0, 1, 1_048_576])
    def test_item_bytes_are_stored_unchanged(self, storage: Storage, size: int) -> None:
        run = an_active_job(storage, id="a{b}:ü")
        items = [bytes([number]) * size for number in range(3)]

        assert emit(storage, run, *items)

        assert items_of(storage, run.id) == items

    def test_item_pages_are_limited_in_size(self, storage: Storage) -> None:
        run = an_active_job(storage)
        half = PAGE_BYTES // 2 + 1
        for start in range(5):
            emit(storage, run, b"%d" % start * half, start=start)

        page = page_of(storage, run.id)

        assert (len(page.items), page.sent) == (2, 5)
        assert [item[:1] for item in items_of(storage, run.id)] == [b"0", b"1", b"2", b"3", b"4"]

    def test_thousands_of_items_are_stored(self, storage: Storage) -> None:
        run = an_active_job(storage)
        items = [b"%d" % number for number in range(9_000)]

        assert emit(storage, run, *items)

        assert items_of(storage, run.id) == items

    @settings(max_examples=10, deadline=None, suppress_health_check=ONE_STORAGE_FOR_ALL)
    @given(
        items=st.lists(st.binary(max_size=4), max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=8),
        again=st.lists(st.integers(0, 8), max_size=3),
    )
    def test_items_can_be_emitted_in_any_batches_and_again(
        self, storage: Storage, items: list[bytes], cuts: list[int], again: list[int]
    ) -> None:
        storage.queues.obliterate(QUEUE, force=True)
        run = an_active_job(storage)
        ends = sorted({min(cut, len(items)) for cut in cuts} | {len(items)})
        starts = [0, *ends[:-1]]
        groups = [(start, items[start:end]) for start, end in zip(starts, ends, strict=True)]

        for number, (start, group) in enumerate(groups):
            assert emit(storage, run, *group, start=start)
            for earlier in again:
                if earlier <= number:
                    assert emit(storage, run, *groups[earlier][1], start=groups[earlier][0])

        assert items_of(storage, run.id) == items
        finish(storage, completing(run))
        assert items_of(storage, run.id) == items

    # For how long.

    def test_items_of_completed_job_expire_with_its_result(self, storage: Storage) -> None:
        run = an_active_job(storage, result_ttl=SOON, retention=LATER)
        emit(storage, run, b"one")
        finish(storage, completing(run))
        assert items_of(storage, run.id) == [b"one"]

        self.advance(SOON + 1)
        assert items_of(storage, run.id) == []
        swept_clean(storage)

        page = page_of(storage, run.id)
        assert (page.state, page.items, page.sent) == (State.COMPLETED, (), 1)
        assert job(storage, run.id).items == 1

    @pytest.mark.parametrize("kept", [{"result_ttl": None}, {"result_ttl": LATER}, {}])
    def test_items_are_kept_while_the_result_is_kept(self, storage: Storage, kept: dict[str, Any]) -> None:
        run = an_active_job(storage, **kept)
        emit(storage, run, b"one")
        finish(storage, completing(run))

        self.pass_time(storage, SOON + 1)

        assert items_of(storage, run.id) == [b"one"]

    def test_items_of_cancelled_job_are_kept_with_its_record(self, storage: Storage) -> None:
        run = an_active_job(storage, result_ttl=SOON, retention=LATER)
        emit(storage, run, b"one")
        finish(storage, cancelling(run))

        self.pass_time(storage, SOON + 1)

        assert items_of(storage, run.id) == [b"one"]

    def test_expired_record_leaves_no_items(self, storage: Storage) -> None:
        run = an_active_job(storage, id="a", result_ttl=SOON)
        emit(storage, run, b"one", b"two")
        finish(storage, completing(run))

        self.advance(SOON + 1)
        swept_clean(storage)

        assert storage.reads.items(QUEUE, [ItemMark("a")]) == [None]
        self._has_no_items(storage, "a")

    @pytest.mark.parametrize("how", [completing, failing, cancelling])
    def test_removed_job_leaves_no_items(self, storage: Storage, how: Callable[[Claimed], Any]) -> None:
        run = an_active_job(storage, id="a")
        emit(storage, run, b"one", b"two")
        finish(storage, how(run))
        assert items_of(storage, "a") == [b"one", b"two"]

        assert storage.jobs.remove(QUEUE, ["a"]) == [True]

        self._has_no_items(storage, "a")

    @pytest.mark.parametrize("how", [failing, cancelling])
    def test_id_enqueued_again_has_no_old_items(
        self, storage: Storage, how: Callable[[Claimed], Any]
    ) -> None:
        run = an_active_job(storage, id="a")
        emit(storage, run, b"one", b"two")
        finish(storage, how(run))

        self._has_no_items(storage, "a")

    def test_obliterated_queue_leaves_no_items(self, storage: Storage) -> None:
        run = an_active_job(storage, id="a")
        emit(storage, run, b"one", b"two")

        storage.queues.obliterate(QUEUE, force=True)

        assert not emit(storage, run, b"three", start=2)
        self._has_no_items(storage, "a")

    def _has_no_items(self, storage: Storage, job_id: str) -> None:
        again = an_active_job(storage, id=job_id)
        assert items_of(storage, job_id) == []
        assert emit(storage, again, b"new")
        assert items_of(storage, job_id) == [b"new"]
        assert job(storage, job_id).items == 1

    # Runs.

    @pytest.mark.parametrize("how", [retrying, releasing])
    def test_next_attempt_starts_without_items(self, storage: Storage, how: Callable[[Claimed], Any]) -> None:
        first = an_active_job(storage)
        emit(storage, first, b"one", b"two")
        before = page_of(storage, first.id).run
        finish(storage, how(first))
        page = page_of(storage, first.id)
        assert (page.state, page.run, page.items, page.sent) == (State.WAITING, 0, (), 0)
        assert job(storage, first.id).items == 0

        second = claim_one(storage)

        page = page_of(storage, first.id, before, 2)
        assert (page.state, page.start, page.items, page.sent) == (State.ACTIVE, 0, (), 0)
        assert page.run not in (0, before)
        assert emit(storage, second, b"three")
        assert page_of(storage, first.id, before, 2).items == (b"three",)
        finish(storage, completing(second))
        assert items_of(storage, first.id) == [b"three"]

    def test_attempt_without_items_clears_items_of_the_previous_attempt(self, storage: Storage) -> None:
        first = an_active_job(storage)
        emit(storage, first, b"one", b"two")
        finish(storage, retrying(first))

        finish(storage, completing(claim_one(storage)))

        page = page_of(storage, first.id)
        assert (page.state, page.run, page.items, page.sent) == (State.COMPLETED, 0, (), 0)

    def test_items_of_stalled_attempt_are_dropped(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")

        self.lose_lease(storage, run.lease)

        assert state(storage, run.id) is State.WAITING
        assert items_of(storage, run.id) == []

    def test_dead_letter_keeps_items_until_it_is_retried(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, b"one")
        finish(storage, failing(run))
        assert items_of(storage, run.id) == [b"one"]
        assert job(storage, run.id).items == 1

        assert storage.jobs.retry(QUEUE, [run.id]) == ["retried"]

        assert items_of(storage, run.id) == []
        again = claim_one(storage)
        assert emit(storage, again, b"two")
        assert items_of(storage, run.id) == [b"two"]

    def test_moved_job_has_no_items(self, storage: Storage) -> None:
        run = an_active_job(storage, id="a")
        emit(storage, run, b"one")
        finish(storage, retrying(run, delay=LATER))

        assert storage.jobs.move(QUEUE, ["a"], "other") == ["moved"]
        storage.jobs.promote("other", ["a"])

        [again] = claim(storage, queues=["other"])
        assert items_of(storage, "a", "other") == []
        assert emit(storage, again, b"two")
        assert items_of(storage, "a", "other") == [b"two"]
        self._has_no_items(storage, "a")

    # Telling.

    def test_item_events_have_the_number_of_items(self, storage: Storage) -> None:
        run = an_active_job(storage)
        with recorded(storage) as recorder:
            emit(storage, run, b"one", b"two")
            emit(storage, run, b"three", start=2)
            emit(storage, run, b"three", start=2)
            told = [(event.event, event.id, event.state, event.items) for event in so_far(storage, recorder)]

        assert told == [("item", run.id, State.ACTIVE, 2), ("item", run.id, State.ACTIVE, 3)]

    # Readers.

    def test_late_reader_gets_all_items(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(*VALUES))
        finish(storage, completing(run))

        assert read(storage, run.id, 0) == VALUES
        assert read(storage, run.id, 0) == VALUES
        assert aread(storage, run.id, 0) == VALUES

    def test_stream_returns_the_result_of_the_job(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(1))
        finish(storage, completing(run))

        def whole() -> Iterator[Any]:
            result = yield from Streaming(storage, 0, "raise").of(QUEUE, run.id)
            yield "result", result

        assert list(whole()) == [1, ("result", "result")]

    def test_reader_gets_items_as_they_are_emitted(self, storage: Storage) -> None:
        run = an_active_job(storage)
        with reading(storage, run.id) as reader:
            for number, value in enumerate(VALUES):
                emit(storage, run, *encoded(value), start=number)
                assert reader.next() == value
            finish(storage, completing(run))
            assert reader.is_at_end()

    def test_async_reader_gets_items_as_they_are_emitted(self, storage: Storage) -> None:
        run = an_active_job(storage)
        asked = []

        async def read_all() -> list[Any]:
            found = []
            async for item in Streaming(storage, PATIENCE, "raise").aof(QUEUE, run.id):
                found.append(item)
                if len(found) < len(VALUES):
                    asked.append(await storage.acall(emit_one, len(found)))
                else:
                    await storage.acall(finish, storage, completing(run))
            return found

        def emit_one(number: int) -> bool:
            return emit(storage, run, *encoded(VALUES[number]), start=number)

        emit_one(0)
        assert async_to_sync(read_all)() == VALUES
        assert all(asked)

    def test_reader_that_enqueues_the_job_misses_no_items(self, storage: Storage) -> None:
        def work(claimed: Claimed) -> None:
            emit(storage, claimed, *encoded(1, 2))
            finish(storage, completing(claimed))

        with worked_at_once(storage, work):
            assert list(Streaming(storage, PATIENCE, "raise").enqueue(batch())) == [1, 2]

        async def read_all() -> list[Any]:
            streaming = Streaming(storage, PATIENCE, "raise")
            return [item async for item in streaming.aenqueue(MSGPACK, lambda: (batch(), False))]

        with worked_at_once(storage, work):
            assert async_to_sync(read_all)() == [1, 2]

    def test_reader_gets_items_of_the_owner_of_a_unique_key(self, storage: Storage) -> None:
        run = an_active_job(storage, unique_key="k")
        emit(storage, run, *encoded(1, 2))
        stream = Streaming(storage, PATIENCE, "raise").enqueue(batch(unique_key="k"))

        assert [next(stream), next(stream)] == [1, 2]
        finish(storage, completing(run))
        assert list(stream) == []

    def test_one_megabyte_items_are_read(self, storage: Storage) -> None:
        run = an_active_job(storage)
        values = ["x" * (1_048_576 - 16), "y" * (1_048_576 - 16)]
        emit(storage, run, *encoded(*values))
        finish(storage, completing(run))

        assert read(storage, run.id, 0) == values

    @pytest.mark.parametrize(
        ("reason", "kind"), [("explicit_fail", JobFailedError), ("max_attempts_exceeded", MaxRetriesError)]
    )
    def test_failed_job_raises_after_its_items(
        self, storage: Storage, reason: str, kind: type[JobFailedError]
    ) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(1, 2))
        finish(storage, failing(run, reason))
        found: list[Any] = []

        with pytest.raises(JobFailedError) as caught:
            read(storage, run.id, 0, into=found)

        assert found == [1, 2]
        assert type(caught.value) is kind
        assert (caught.value.error_type, caught.value.error_message, caught.value.traceback) == ERROR

    def test_cancelled_job_raises_after_its_items(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(1))
        finish(storage, cancelling(run))
        found: list[Any] = []

        with pytest.raises(JobCancelledError):
            read(storage, run.id, 0, into=found)

        assert found == [1]

    def test_timeout_of_the_reader_does_not_stop_the_job(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(1))
        found: list[Any] = []

        with pytest.raises(ResultTimeoutError, match="was not stopped"):
            read(storage, run.id, 0.05, into=found)
        with pytest.raises(ResultTimeoutError, match="was not stopped"):
            aread(storage, run.id, 0.05)

        assert found == [1]
        assert state(storage, run.id) is State.ACTIVE

    def test_reading_items_of_unknown_job_raises(self, storage: Storage) -> None:
        with pytest.raises(JobNotFoundError):
            read(storage, "nobody", 0)

    def test_removed_job_raises_an_error_to_its_reader(self, storage: Storage) -> None:
        job_id = enqueue(storage, delay=LATER)
        with reading(storage, job_id) as reader:
            reader.has_begun()
            storage.jobs.remove(QUEUE, [job_id])
            with pytest.raises(JobNotFoundError):
                reader.next()

    def test_expired_items_raise_instead_of_an_empty_stream(self, storage: Storage) -> None:
        run = an_active_job(storage, result_ttl=SOON, retention=LATER)
        emit(storage, run, *encoded(1))
        finish(storage, completing(run))
        without = a_completed_job(storage)
        self.pass_time(storage, SOON + 1)

        with pytest.raises(JobNotFoundError, match="its items have expired"):
            read(storage, run.id, 0)
        assert read(storage, without, 0) == []

    @pytest.mark.parametrize("how", [retrying, releasing])
    def test_new_attempt_raises_stream_restarted_to_the_reader(
        self, storage: Storage, how: Callable[[Claimed], Any]
    ) -> None:
        first = an_active_job(storage)
        emit(storage, first, *encoded(1, 2))
        with reading(storage, first.id) as reader:
            assert [reader.next(), reader.next()] == [1, 2]
            finish(storage, how(first))
            emit(storage, claim_one(storage), *encoded(1))
            with pytest.raises(StreamRestartedError, match="2 items"):
                reader.next()

    def test_reader_can_continue_with_the_new_attempt(self, storage: Storage) -> None:
        first = an_active_job(storage)
        emit(storage, first, *encoded(1, 2))
        with reading(storage, first.id, on_restart="continue") as reader:
            assert [reader.next(), reader.next()] == [1, 2]
            finish(storage, retrying(first))
            second = claim_one(storage)
            emit(storage, second, *encoded(1))
            assert reader.next() == 1
            emit(storage, second, *encoded(2, 3), start=1)
            assert [reader.next(), reader.next()] == [2, 3]
            finish(storage, completing(second))
            assert reader.is_at_end()

    def test_reader_without_items_does_not_notice_a_new_attempt(self, storage: Storage) -> None:
        first = an_active_job(storage)
        with reading(storage, first.id) as reader:
            reader.has_begun()
            emit(storage, first)
            finish(storage, retrying(first))
            second = claim_one(storage)
            emit(storage, second, *encoded(1))
            assert reader.next() == 1
            finish(storage, completing(second))
            assert reader.is_at_end()

    @pytest.mark.parametrize("on_restart", ["raise", "continue"])
    def test_new_attempt_without_items_voids_earlier_items(self, storage: Storage, on_restart: str) -> None:
        first = an_active_job(storage)
        emit(storage, first, *encoded(1))
        stream = Streaming(storage, PATIENCE, on_restart).of(QUEUE, first.id)
        assert next(stream) == 1
        finish(storage, retrying(first))
        finish(storage, completing(claim_one(storage)))

        if on_restart == "raise":
            with pytest.raises(StreamRestartedError):
                next(stream)
        else:
            assert list(stream) == []

    def test_late_reader_gets_items_of_the_last_attempt_only(self, storage: Storage) -> None:
        first = an_active_job(storage)
        emit(storage, first, *encoded(1, 2, 3))
        finish(storage, retrying(first))
        second = claim_one(storage)
        emit(storage, second, *encoded(4))
        finish(storage, completing(second))

        assert read(storage, first.id, 0) == [4]

    def test_closed_stream_unsubscribes(self, storage: Storage) -> None:
        run = an_active_job(storage)
        emit(storage, run, *encoded(1, 2))
        unsubscribed = []
        subscribe = storage.events.subscribe

        def counting(*args: Any) -> Any:
            unsubscribe = subscribe(*args)

            def noted() -> None:
                unsubscribed.append(True)
                unsubscribe()

            return noted

        vars(storage.events)["subscribe"] = counting
        try:
            stream = Streaming(storage, PATIENCE, "raise").of(QUEUE, run.id)
            assert next(stream) == 1
            stream.close()
        finally:
            del vars(storage.events)["subscribe"]

        assert unsubscribed == [True]
        assert finish(storage, completing(run)) == [True]


def read(storage: Storage, job_id: str, wait: float, into: list[Any] | None = None) -> list[Any]:
    """Return all values that a reader is given."""
    found: list[Any] = [] if into is None else into
    for item in Streaming(storage, wait, "raise").of(QUEUE, job_id):
        found.append(item)  # noqa: PERF402 - what came before an error is looked at
    return found


def aread(storage: Storage, job_id: str, wait: float) -> list[Any]:
    """The same, for a coroutine."""

    async def all_of_them() -> list[Any]:
        return [item async for item in Streaming(storage, wait, "raise").aof(QUEUE, job_id)]

    return async_to_sync(all_of_them)()


class StreamReaderThread:
    """A reader on its own thread, as one in another process would be."""

    def __init__(self, storage: Storage, job_id: str, on_restart: str) -> None:
        self._stream = Streaming(storage, PATIENCE, on_restart).of(QUEUE, job_id)
        self._storage = storage
        self._asked = ThreadEvent()
        self._answers: list[tuple[str, Any]] = []
        self._answered = ThreadEvent()
        self._begun = ThreadEvent()
        self._over = False
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Read what there is, or wait for it."""
        self._thread.start()

    def has_begun(self) -> None:
        """Wait until it waits for something that is not there yet."""
        assert self._begun.wait(PATIENCE)

    def next(self) -> Any:
        """Return the next value. Raises what the stream raises."""
        assert self._answered.wait(PATIENCE)
        word, value = self._answers.pop()
        self._answered.clear()
        self._asked.set()
        if word == "error":
            raise value
        assert word == "item", "the stream has ended"
        return value

    def is_at_end(self) -> bool:
        """Return whether nothing comes any more."""
        assert self._answered.wait(PATIENCE)
        return self._answers.pop()[0] == "end"

    def leave(self) -> None:
        """Read no more."""
        self._over = True
        self._asked.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        items = self._storage.reads.items

        def looked(*args: Any) -> Any:
            pages = items(*args)
            self._begun.set()
            return pages

        vars(self._storage.reads)["items"] = looked
        try:
            for item in self._stream:
                self._answer("item", item)
                self._asked.wait(PATIENCE)
                self._asked.clear()
                if self._over:
                    self._stream.close()
                    return
        except Exception as error:
            self._answer("error", error)
        else:
            self._answer("end", None)
        finally:
            vars(self._storage.reads).pop("items", None)

    def _answer(self, word: str, value: Any) -> None:
        self._answers.append((word, value))
        self._answered.set()


@contextmanager
def reading(storage: Storage, job_id: str, on_restart: str = "raise") -> Iterator[StreamReaderThread]:
    """Read a job's items while it runs."""
    reader = StreamReaderThread(storage, job_id, on_restart)
    reader.start()
    try:
        yield reader
    finally:
        reader.leave()


@contextmanager
def worked_at_once(storage: Storage, work: Callable[[Claimed], None]) -> Iterator[None]:
    """Claim jobs as soon as an event reports them."""
    done = ThreadEvent()

    def on_event(event: Any) -> None:
        if event.event == "enqueued":
            for claimed in claim(storage):
                work(claimed)
            done.set()

    unsubscribe = storage.events.subscribe(QUEUE, on_event)
    try:
        yield
        assert done.wait(PATIENCE)
    finally:
        unsubscribe()
