"""The scheduler's socket: who may enter, what goes over it, and what becomes of it when either side goes."""

import inspect
import logging
import os
import queue
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from djqueue import models
from djqueue.client import Queue
from djqueue.codecs import MSGPACK, encode
from djqueue.core import errors
from djqueue.core.errors import (
    ConfigurationError,
    DjqueueError,
    OptionError,
    StorageError,
    StorageUnavailableError,
)
from djqueue.core.limiter import Rate
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage, journal, server, session
from djqueue.storage.journaled.address import parse_address
from djqueue.storage.journaled.framing import connect
from djqueue.storage.wire import LENGTH, MAX_FRAME, pack, unpack
from djqueue.testing.factories import (
    NAME,
    QUEUE,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    lease_of,
    releasing,
    report_of,
    request,
    state,
    worker,
)
from djqueue.testing.waiting import Recorder, Wakes
from tests.support import PATIENCE, eventually

from .conftest import MakeStorage, StartChild

ANY_PORT = "tcp://127.0.0.1:0"
TOKEN = "open sesame"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="djqueue-") as made:
        yield Path(made)


def connected(make_storage: MakeStorage, **options: Any) -> JournaledStorage:
    storage = make_storage(**options)
    storage.role.standby = "never"
    storage.connect()
    return storage


def call(client: JournaledStorage, operation: str, *args: Any, **kwargs: Any) -> Any:
    return client._client._remote.call(operation, *args, **kwargs)


def sessions(scheduler: JournaledStorage) -> int:
    """How many clients are connected."""
    assert scheduler._server is not None
    return len(scheduler._server._sessions)


def cut(scheduler: JournaledStorage) -> None:
    """Hang up on everybody, as if the network had."""
    assert scheduler._server is not None
    for task in list(scheduler._server._sessions):
        scheduler._server._loop.call_soon_threadsafe(task.cancel)


def cut_and_back(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    """Hang up on a client that has subscriptions, and wait until it is there again."""
    remote = client._client._remote
    before = remote._socket
    cut(scheduler)
    eventually(lambda: remote._socket not in (before, None))


class Stranger:
    """A connection that says what it likes."""

    def __init__(self, scheduler: JournaledStorage) -> None:
        assert scheduler._server is not None
        self.socket = connect(scheduler._server.address)
        self.socket.settimeout(PATIENCE)

    def says(self, data: bytes) -> None:
        self.socket.sendall(data)

    def hears(self) -> list[Any]:
        [length] = LENGTH.unpack(self.socket.recv(LENGTH.size, socket.MSG_WAITALL))
        frame: list[Any] = unpack(self.socket.recv(length, socket.MSG_WAITALL))
        return frame

    def is_hung_up_on(self) -> bool:
        """Once it has read what there is to read."""
        try:
            while self.socket.recv(1_000):
                pass
        except ConnectionError:
            pass
        return True

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# Who may enter: Unix domain sockets.


def test_only_this_user_opens_socket(make_storage: MakeStorage, folder: Path) -> None:
    path = folder / "inner" / "djqueue.sock"
    scheduler = connected(make_storage, address=f"unix://{path}")

    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    scheduler.close()
    assert not path.exists()


def test_default_address_is_in_folder_of_this_user(scheduler: JournaledStorage) -> None:
    assert scheduler._server is not None
    path = Path(scheduler._server.address.path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.name == f"djqueue-{os.getuid()}"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777, 0o755, 0o711, 0o740], ids=oct)
def test_folder_that_is_open_to_others_is_rejected(
    make_storage: MakeStorage, folder: Path, mode: int
) -> None:
    folder.chmod(mode)

    with pytest.raises(ConfigurationError, match=rf"the folder {folder} has the mode {mode:04o}.*chmod 700"):
        connected(make_storage, address=f"unix://{folder}/djqueue.sock")

    assert list(folder.iterdir()) == []
    connected(make_storage)  # the place has been given back


def test_error_names_unusable_address(make_storage: MakeStorage, folder: Path) -> None:
    path = folder / ("long" * 50)

    with pytest.raises(StorageError, match=f"cannot listen on unix://{path}"):
        connected(make_storage, address=f"unix://{path}")

    connected(make_storage)


def test_stale_socket_does_not_keep_scheduler_from_starting(make_storage: MakeStorage, folder: Path) -> None:
    path = folder / "djqueue.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.exists()

    connected(make_storage, address=f"unix://{path}")

    job_id = enqueue(client := make_storage())
    assert eventually(lambda: claim_ids(client)) == [job_id]


def test_socket_of_killed_scheduler_is_taken_over(make_storage: MakeStorage, start_child: StartChild) -> None:
    child = start_child("scheduler")
    child.hears_until("ready")
    client = make_storage()
    job_id = enqueue(client)
    child.kill()

    connected(make_storage)

    assert eventually(lambda: claim_ids(client)) == [job_id]


def test_scheduler_leaves_socket_of_its_successor(make_storage: MakeStorage, folder: Path) -> None:
    path = folder / "djqueue.sock"
    scheduler = connected(make_storage, address=f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as successor:
        path.rename(folder / "old.sock")
        successor.bind(str(path))

    scheduler.close()

    assert path.exists()


# Who may enter: TCP.


def test_tcp_address_needs_token(make_storage: MakeStorage) -> None:
    with pytest.raises(ConfigurationError, match="ADDRESS: a TCP address requires a TOKEN"):
        connected(make_storage, address=ANY_PORT)

    connected(make_storage)


def test_client_with_token_works_over_tcp(make_storage: MakeStorage) -> None:
    scheduler = connected(make_storage, address=ANY_PORT, token=TOKEN)
    client = make_storage(token=TOKEN)

    job_id = enqueue(client, durable=False)
    [claimed] = claim(client)

    assert claimed.id == job_id
    assert finish(client, completing(claimed)) == [True]
    assert state(scheduler, job_id) is State.COMPLETED
    assert models.SchedulerLease.objects.get().address.startswith("tcp://127.0.0.1:")
    assert not models.SchedulerLease.objects.get().address.endswith(":0")


@pytest.mark.parametrize("token", [None, "", "open barley", TOKEN + " "])
@pytest.mark.parametrize("address", [ANY_PORT, None], ids=["tcp", "unix"])
def test_client_with_wrong_token_receives_error(
    make_storage: MakeStorage, address: str | None, token: str | None
) -> None:
    scheduler = connected(make_storage, address=address, token=TOKEN)
    job_id = enqueue(scheduler)

    for _ in range(20):  # whatever comes first, the refusal or the end of the connection
        client = make_storage(token=token)
        with pytest.raises(StorageUnavailableError, match=r"the TOKEN in .* does not match the scheduler's"):
            claim(client)

    assert state(scheduler, job_id) is State.WAITING
    assert claim_ids(make_storage(token=TOKEN)) == [job_id]


@pytest.mark.parametrize(
    "first",
    [
        pack([1, "claim", [request()], {}]),
        pack(TOKEN.encode()),
        pack("half a pair: \ud800"),
        LENGTH.pack(session.MAX_TOKEN_FRAME + 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["request", "bytes", "surrogate", "long", "http"],
)
def test_connection_without_token_is_closed(
    make_storage: MakeStorage, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    scheduler = connected(make_storage, address=ANY_PORT, token=TOKEN)

    with Stranger(scheduler) as stranger:
        stranger.says(first)
        assert stranger.is_hung_up_on()
    eventually(lambda: sessions(scheduler) == 0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_silent_connection_is_closed(make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = connected(make_storage, address=ANY_PORT, token=TOKEN)
    client = make_storage(token=TOKEN)
    client.workers.register(worker())
    monkeypatch.setattr(session, "FIRST_FRAME", 0.05)

    with Stranger(scheduler) as stranger:
        assert stranger.is_hung_up_on()
    eventually(lambda: sessions(scheduler) == 1)
    client.workers.register(worker())


# What strangers say hurts nobody else.


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(MAX_FRAME + 1),
        LENGTH.pack(2**32 - 1) + bytes(1_000),
        LENGTH.pack(0),
        pack("a token that nobody asked for"),
        pack([]),
        pack([1, "queues.pause", "queue", {}]),
        pack([1, "queues.pause", ["queue"], {5: 1}]),
        pack([True, "queues.pause", ["queue"], {}]),
        LENGTH.pack(9_000) + b"\xc9\x00\x00\x23\x22\x01" * 1_500,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_connection_that_sends_invalid_data_is_closed_and_others_stay(
    scheduler: JournaledStorage, client: JournaledStorage, data: bytes
) -> None:
    client.workers.register(worker())

    with Stranger(scheduler) as stranger:
        stranger.says(data)
        assert stranger.is_hung_up_on()

    eventually(lambda: sessions(scheduler) == 1)
    claimed = an_active_job(client, durable=False)
    assert finish(client, completing(claimed)) == [True]
    assert not scheduler.queues.is_paused("queue")


@pytest.mark.parametrize("data", [b"", b"\x00", LENGTH.pack(100), LENGTH.pack(MAX_FRAME) + bytes(100_000)])
def test_incomplete_frame_does_not_delay_other_clients(
    scheduler: JournaledStorage, client: JournaledStorage, data: bytes
) -> None:
    client.workers.register(worker())

    with Stranger(scheduler) as stranger:
        stranger.says(data)
        eventually(lambda: sessions(scheduler) == 2)
        claimed = an_active_job(client, durable=False)
        assert finish(client, completing(claimed)) == [True]

    eventually(lambda: sessions(scheduler) == 1)


def test_client_that_reads_no_answers_does_not_delay_others(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    job_id = enqueue(client, payload=bytes(1_000_000), durable=False)

    with Stranger(scheduler) as stranger:
        for number in range(1, 21):
            stranger.says(pack([number, "reads.jobs", [QUEUE, [job_id]], {}]))
        [claimed] = claim(client)
        assert finish(client, completing(claimed)) == [True]

    eventually(lambda: sessions(scheduler) == 1)


def test_subscriber_that_stops_reading_is_disconnected(
    scheduler: JournaledStorage,
    client: JournaledStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "MAX_UNSENT", 200_000)
    wide = "q" * 250
    told = Recorder()
    client.events.subscribe(wide, told)

    with Stranger(scheduler) as stranger:
        stranger.says(pack([1, "subscribe", [1, wide, None], {}]))
        assert stranger.hears() == [1, "ok", None]
        for number in range(1, 21):
            enqueue_many(scheduler, 200, queue=wide)
            assert len(claim(scheduler, 200)) == 200
            told.until_true(lambda many=number * 200: told.count("active") == many, "all that happened")
        eventually(lambda: sessions(scheduler) == 1)
        assert stranger.is_hung_up_on()

    assert "stopped reading its subscription" in caplog.text


def test_scheduler_closes_despite_hanging_clients(make_storage: MakeStorage) -> None:
    scheduler = connected(make_storage)
    with Stranger(scheduler) as silent, Stranger(scheduler) as half:
        half.says(LENGTH.pack(100))
        eventually(lambda: sessions(scheduler) == 2)

        scheduler.close()

        assert silent.is_hung_up_on()
        assert half.is_hung_up_on()
    connected(make_storage)


def test_scheduler_ends_without_error_when_client_reads_its_last_answers_late(
    make_storage: MakeStorage, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = connected(make_storage)
    job_id = enqueue(scheduler, payload=bytes(1_000_000))
    found = scheduler._server
    assert found is not None

    with Stranger(scheduler) as stranger:
        stranger.says(pack([1, "reads.jobs", [QUEUE, [job_id]], {}]))
        eventually(lambda: found._unauthenticated == {} and sessions(scheduler) == 1)
        assert stranger.socket.recv(1)  # The answer is on its way, and too long for the socket.
        closing = threading.Thread(target=scheduler.close)
        closing.start()
        eventually(lambda: not Path(found.address.path).exists())
        assert stranger.is_hung_up_on()
        closing.join()

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_client_whose_answer_takes_too_long_is_disconnected_on_close(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE", 0.01)
    scheduler = connected(make_storage)
    asked, goes_on = threading.Event(), threading.Event()

    def counts(queue: str) -> dict[State, int]:
        asked.set()
        assert goes_on.wait(PATIENCE)
        return {}

    assert scheduler._server is not None
    monkeypatch.setattr(scheduler._server.storage.reads, "counts", counts)
    with Stranger(scheduler) as stranger:
        stranger.says(pack([1, "reads.counts", [QUEUE], {}]))
        assert asked.wait(PATIENCE)
        closing = threading.Thread(target=scheduler.close)
        closing.start()
        try:
            assert stranger.is_hung_up_on()
        finally:
            goes_on.set()
            closing.join()


# What goes over it.


@pytest.mark.parametrize(
    "operation", ["nonsense", "close", "connect", "_flush", "__class__", "engine", "claim", ""]
)
def test_socket_rejects_operations_outside_contract(
    scheduler: JournaledStorage, client: JournaledStorage, operation: str
) -> None:
    with pytest.raises(StorageError, match=f"{operation!r} is not an operation of the storage"):
        call(client, operation)

    assert claim_ids(client) == []


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("queues.pause", []),
        ("reads.states", [QUEUE]),
        ("renew", [5]),
        ("finish", [None]),
        ("subscribe", []),
        ("listen", []),
    ],
)
def test_operation_with_wrong_arguments_raises_error(
    scheduler: JournaledStorage, client: JournaledStorage, operation: str, args: list[Any]
) -> None:
    with pytest.raises(StorageError, match="Error"):
        call(client, operation, *args)

    assert claim_ids(client) == []


ERRORS = [
    error
    for error in vars(errors).values()
    if inspect.isclass(error) and issubclass(error, DjqueueError) and not error.__name__.startswith("_")
]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_come_over_with_their_class_and_message(
    scheduler: JournaledStorage,
    client: JournaledStorage,
    monkeypatch: pytest.MonkeyPatch,
    error: type[DjqueueError],
) -> None:
    def fails(_: object) -> None:
        raise error("not on a “Sunday”")

    monkeypatch.setattr(scheduler.active.workers, "register", fails)

    with pytest.raises(error) as caught:
        client.workers.register(worker())

    assert type(caught.value) is error
    assert str(caught.value) == "not on a “Sunday”"


def test_error_of_engine_is_same_on_both_sides(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    an_active_job(scheduler)
    with pytest.raises(StorageError) as here:
        scheduler.queues.obliterate(QUEUE)

    with pytest.raises(StorageError) as there:
        client.queues.obliterate(QUEUE)
    with pytest.raises(OptionError, match="queue 'default' has no job 'nowhere'"):
        enqueue(client, depends_on=((QUEUE, "nowhere"),), durable=False)

    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)


def test_unexpected_error_is_storage_error_that_scheduler_logs(
    scheduler: JournaledStorage,
    client: JournaledStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(_: str) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(scheduler.active.queues, "pause", fails)

    with pytest.raises(StorageError, match="ZeroDivisionError: by nought"):
        client.queues.pause(QUEUE)

    [record] = [record for record in caplog.records if record.name == "djqueue.server"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_client_claims_and_finishes_jobs(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    job_id = enqueue(client, durable=False)
    [claimed] = claim(client)

    [renewal] = client.renew([lease_of(claimed)])
    accepted = client.report([report_of(claimed, {"done": 0.5}, [(1, "half")])])

    assert (claimed.id, renewal.held, accepted) == (job_id, True, [True])
    assert job(scheduler, job_id).progress == {"done": 0.5}
    assert job(scheduler, job_id).logs == ((1, "half"),)
    finished = client.finish([completing(claimed, b"result")], request())
    assert (finished.accepted, finished.claims.jobs) == ([True], [])
    assert job(client, job_id).result == b"result"
    assert job(client, job_id).state is State.COMPLETED


def test_client_pages_through_dead_letters_and_retries_them(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    for number in range(5):
        a_failed_job(scheduler, id=str(number), name=f"name {number % 2}")
    scheduler.reads.counts(QUEUE)  # all is written

    pages = [client.reads.dead_letter_page(QUEUE, 2)]
    while (after := pages[-1].next) is not None:
        pages.append(client.reads.dead_letter_page(QUEUE, 2, after))

    assert [[letter.id for letter in page.dead_letters] for page in pages] == [["0", "1"], ["2", "3"], ["4"]]
    assert [letter for page in pages for letter in page.dead_letters] == scheduler.reads.dead_letters(QUEUE)
    queue = Queue(QUEUE, storage=client)
    assert queue.retry_dead(name="name 1", dry_run=True).retried == 2
    assert queue.retry_dead(name="name 1").retried == 2
    assert [letter.id for letter in scheduler.reads.dead_letters(QUEUE)] == ["0", "2", "4"]


def test_dead_letters_are_retried_without_scheduler(
    make_storage: MakeStorage, scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    a_failed_job(scheduler, id="a")
    a_failed_job(scheduler, id="b")
    scheduler.close()
    queue = Queue(QUEUE, storage=client)

    assert queue.retry_dead(dry_run=True).retried == 2
    assert queue.counts()["failed"] == 2
    assert queue.retry_dead(limit=1).retried == 1
    assert [letter.id for letter in queue.dead_letters()] == ["b"]


def test_stale_token_is_rejected_over_socket(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    stale = an_active_job(client, durable=False)
    assert finish(client, releasing(stale)) == [True]
    held = claim_one(client)
    assert held.id == stale.id

    assert finish(client, completing(stale, b"stale")) == [False]
    assert client.report([report_of(stale, "stale"), report_of(held, "held")]) == [False, True]
    assert [renewal.held for renewal in client.renew([lease_of(stale), lease_of(held)])] == [False, True]

    assert job(scheduler, held.id).progress == "held"
    assert finish(client, completing(held, b"held")) == [True]
    assert finish(client, completing(held, b"again")) == [False]
    assert job(scheduler, held.id).result == b"held"


def test_another_process_claims_and_finishes_jobs(
    scheduler: JournaledStorage, start_child: StartChild
) -> None:
    ids = [enqueue(scheduler) for _ in range(3)]
    child = start_child("client")
    child.hears_until("ready")
    child.tell("work 3")

    assert [child.hears() for _ in ids] == ids
    assert child.hears() == "done True True True"
    assert counts(scheduler) == {State.COMPLETED: 3}
    assert child.ends() == 0


def test_durable_false_enqueue_is_sent_over_socket(
    scheduler: JournaledStorage, client: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    enqueue(scheduler, queue="other")  # a write has begun to wait

    job_id = enqueue(client, durable=False)

    assert not models.Job.objects.filter(job_id=job_id).exists()
    assert claim_ids(client, queues=[QUEUE]) == [job_id]


def test_durable_false_enqueue_is_written_without_scheduler(
    client: JournaledStorage, make_storage: MakeStorage
) -> None:
    job_id = enqueue(client, durable=False)
    assert models.Job.objects.get(job_id=job_id).inbox

    assert claim_ids(connected(make_storage)) == [job_id]


def test_enqueue_whose_answer_was_lost_is_one_job(
    scheduler: JournaledStorage, client: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = scheduler.active.enqueue_at_once  # type: ignore[attr-defined]
    client.workers.register(worker())

    def accepts_and_is_cut_off(batches: Any) -> Any:
        answers = accept(batches)
        client._client._remote._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        return answers

    monkeypatch.setattr(scheduler.active, "enqueue_at_once", accepts_and_is_cut_off)
    [result] = client.enqueue([batch(durable=False)])

    assert result.status in ("queued", "duplicate")
    assert eventually(lambda: claim_ids(scheduler, 5)) == [result.id]
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())
    assert models.Job.objects.count() == 1


# Connections that end.


def test_subscriptions_are_renewed_with_next_scheduler(
    scheduler: JournaledStorage, client: JournaledStorage, make_storage: MakeStorage
) -> None:
    told, of_one, woken = Recorder(), Recorder(), Wakes()
    client.events.subscribe(QUEUE, told)
    client.events.subscribe(QUEUE, of_one, "mine")
    client.listen(None, woken)
    woken.forget()

    scheduler.close()
    following = connected(make_storage)

    assert woken.arrived()  # of what may have happened meanwhile
    client.renew([])  # the subscriptions went before it on the same connection
    other, mine = an_active_job(following), an_active_job(following, id="mine")
    told.until("active", other.id)
    told.until("active", mine.id)
    of_one.until("active", mine.id)
    assert of_one.words(other.id) == []
    assert told.words(mine.id).count("active") == 1


def test_subscription_made_before_any_scheduler_is_renewed_with_first(
    client: JournaledStorage, make_storage: MakeStorage
) -> None:
    told, woken = Recorder(), Wakes()
    client.events.subscribe(QUEUE, told)
    client.listen([QUEUE], woken)

    scheduler = connected(make_storage)
    assert woken.arrived()
    client.renew([])

    told.until("active", an_active_job(scheduler).id)


def test_ended_subscription_is_not_renewed(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    told, kept = Recorder(), Recorder()
    unsubscribe = client.events.subscribe(QUEUE, told)
    client.events.subscribe(QUEUE, kept)
    unsubscribe()
    cut_and_back(scheduler, client)
    client.renew([])

    kept.until("active", an_active_job(scheduler).id)

    assert told.events() == []


def test_call_after_cut_finds_scheduler_again(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    claimed = an_active_job(client, durable=False)
    cut(scheduler)
    eventually(lambda: not client._client._remote.connected)

    assert finish(client, completing(claimed)) == [True]


class Asking:
    """A caller that waits, on a thread of its own, for what its job returns."""

    def __init__(self, client: JournaledStorage) -> None:
        self._client = client
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def answer(self) -> Any:
        """What it was told: the result, or the error."""
        answer = self._answers.get(timeout=PATIENCE)
        self._thread.join()
        return answer

    def _ask(self) -> None:
        asked = Queue(QUEUE, storage=self._client)
        try:
            self._answers.put(asked.enqueue_and_wait("question", name=NAME, wait=PATIENCE))
        except BaseException as error:
            self._answers.put(error)
        finally:
            connection.close()


@pytest.mark.parametrize("missed", [False, True], ids=["heard", "missed"])
def test_enqueue_and_wait_survives_dropped_connection(
    scheduler: JournaledStorage, client: JournaledStorage, monkeypatch: pytest.MonkeyPatch, missed: bool
) -> None:
    asking = Asking(client)
    [claimed] = eventually(lambda: claim(scheduler))
    if missed:
        cut(scheduler)
    else:
        cut_and_back(scheduler, client)
    assert finish(scheduler, completing(claimed, encode("answer", MSGPACK))) == [True]

    assert asking.answer() == "answer"


def test_enqueue_and_wait_survives_change_of_schedulers(
    scheduler: JournaledStorage, client: JournaledStorage, make_storage: MakeStorage
) -> None:
    asking = Asking(client)
    eventually(lambda: counts(scheduler) == {State.WAITING: 1})
    scheduler.close()
    following = connected(make_storage)
    [claimed] = eventually(lambda: claim(following))
    assert finish(following, completing(claimed, encode("answer", MSGPACK))) == [True]

    assert asking.answer() == "answer"


# Without a scheduler.


@pytest.mark.parametrize(
    "operation",
    [
        lambda client: client.claim(request()),
        lambda client: client.finish([]),
        lambda client: client.renew([]),
        lambda client: client.report([]),
        lambda client: client.workers.register(worker()),
    ],
    ids=["claim", "finish", "renew", "report", "register_worker"],
)
def test_worker_operations_without_scheduler_name_command_to_start(
    client: JournaledStorage, operation: Callable[[JournaledStorage], Any]
) -> None:
    with pytest.raises(StorageUnavailableError, match=r"no scheduler is running.*manage\.py runworkers"):
        operation(client)


def test_error_names_address_of_unreachable_scheduler(
    make_storage: MakeStorage, client: JournaledStorage, folder: Path
) -> None:
    path = folder / "djqueue.sock"
    connected(make_storage, address=f"unix://{path}")
    path.unlink()  # as on another machine

    with pytest.raises(StorageUnavailableError, match=rf"cannot be reached at unix://{path}.*tcp://.*TOKEN"):
        claim(client)
    with pytest.raises(StorageUnavailableError, match=f"cannot be reached at unix://{path}"):
        client.queues.pause(QUEUE)  # a scheduler runs, so this process does not do it


def later(storage: JournaledStorage) -> int:
    return storage._clock.now() + 3_600_000


@pytest.mark.parametrize("reached", [False, True], ids=["no scheduler", "over the socket"])
def test_changes_by_client_are_known_to_next_scheduler(
    make_storage: MakeStorage, client: JournaledStorage, reached: bool
) -> None:
    first = connected(make_storage)
    failed = a_failed_job(first)
    gone = a_completed_job(first, queue="done")
    cancelled, removed, put_off = (a_waiting_job(first) for _ in range(3))
    promoted = a_delayed_job(first)
    kept = [a_waiting_job(first, queue=name) for name in ("paused", "limited", "limited", "void", "resumed")]
    first.queues.pause("resumed")
    if not reached:
        first.close()

    assert [result.status for result in client.jobs.cancel(QUEUE, [cancelled, "nowhere"])] == [
        "cancelled",
        "not_found",
    ]
    assert client.jobs.promote(QUEUE, [promoted, removed]) == [True, False]
    assert client.jobs.reschedule(QUEUE, [put_off, "nowhere"], later(client)) == [True, False]
    assert client.jobs.update(QUEUE, [promoted, "nowhere"], 4, b"other") == [True, False]
    assert client.jobs.retry(QUEUE, [failed, removed]) == ["retried", "not_failed"]
    assert client.jobs.remove(QUEUE, [removed, "nowhere"]) == [True, False]
    client.queues.pause("paused")
    client.queues.resume("resumed")
    client.queues.set_limits("limited", Rate(5, 1_000), 1)
    assert client.queues.clean("done", frozenset({State.COMPLETED}), later(client)) == 1
    assert client.queues.obliterate("void") == 1
    assert client.queues.is_paused("paused")

    first.close()
    following = connected(make_storage)

    found = following.reads.states(QUEUE, [cancelled, promoted, put_off, failed, removed])
    assert found == [State.CANCELLED, State.WAITING, State.DELAYED, State.WAITING, None]
    assert state(following, gone, "done") is None
    assert following.reads.dead_letters(QUEUE) == []
    assert following.queues.is_paused("paused")
    assert not following.queues.is_paused("resumed")
    assert counts(following, "void") == {}
    record = job(following, promoted)
    assert (record.options.priority, record.payload) == (4, b"other")
    claimed = claim_ids(following, 10)
    assert sorted(claimed) == sorted([promoted, failed, kept[1], kept[4]])  # one of the two limited ones


def test_address_round_trips_through_its_text() -> None:
    for text in ("unix:///run/djqueue.sock", "tcp://127.0.0.1:7000", "tcp://host.example:0"):
        assert str(parse_address(text)) == text
