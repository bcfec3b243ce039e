"""Clients: what they do without a scheduler, and whom they talk to."""

import asyncio
import os
import shutil
import signal
import threading
from time import monotonic

import pytest
from django.db import transaction

from djqueue import models
from djqueue.core.deadlines import within
from djqueue.core.errors import (
    ConfigurationError,
    OptionError,
    SchedulerRunningError,
    StorageUnavailableError,
)
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.operations.relay import relay_of
from djqueue.storage.scheduler import server
from djqueue.storage.scheduler.folder import PrivateFolder, default_folder
from djqueue.storage.snapshots import JOB, Part
from djqueue.storage.wire import LENGTH, MAX_FRAME
from djqueue.testing.factories import (
    QUEUE,
    batch,
    claim,
    claim_ids,
    completing,
    counts,
    enqueue,
    finish,
    state,
)
from djqueue.testing.waiting import Recorder
from tests.support import PATIENCE, eventually

from .crashes import answers, crash, end_lease
from .programs import Child

pytestmark = pytest.mark.scheduler


@pytest.fixture
def away(make_storage, monkeypatch):
    """A client without a scheduler."""
    monkeypatch.setattr("djqueue.storage.scheduler.client.RESTART_TIMEOUT", 0.0)
    return make_storage()


def test_jobs_enqueued_without_a_scheduler_are_delivered_in_order(away, make_storage):
    ids = [enqueue(away) for _ in range(3)]

    scheduler = make_storage(here=True)
    relay_of(scheduler).relay_once()

    assert claim_ids(scheduler, 10) == ids


def test_other_calls_without_a_scheduler_say_so(away):
    with pytest.raises(StorageUnavailableError, match="no scheduler is running"):
        counts(away)
    assert away.outage is not None
    with pytest.raises(StorageUnavailableError, match="runworkers"):
        away.queues.pause(QUEUE)


def test_frozen_scheduler_is_not_said_to_be_away(away, tmp_path):
    with (
        PrivateFolder(tmp_path / "s").listen(1),
        within(0.1),
        pytest.raises(StorageUnavailableError, match="does not answer"),
    ):
        counts(away)


def test_jobs_of_a_client_that_finds_no_place_wait_in_the_outbox(scheduler, make_storage, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.server.MAX_SESSIONS", 0)

    enqueue(make_storage(), id="a")

    assert [row.job_id for row in models.OutboxJob.objects.all()] == ["a"]


def test_flow_is_refused_without_a_scheduler(away):
    first = batch(ids=["a"])
    with pytest.raises(StorageUnavailableError):
        away.enqueue([first, batch(ids=["b"], depends_on=((QUEUE, "a"),))])


def test_jobs_of_a_transaction_exist_when_it_commits(client, scheduler):
    with transaction.atomic():
        enqueue(client, id="a")
        assert state(client, "a") is None
    with transaction.atomic():
        enqueue(client, id="b")
        transaction.set_rollback(True)

    relay_of(scheduler).relay_once()

    assert [state(client, name) is not None for name in ("a", "b")] == [True, False]


def test_job_that_the_scheduler_refuses_keeps_no_other_job_in_the_outbox(away, make_storage, caplog):
    for number in range(3):
        enqueue(away, id=f"job-{number}", concurrency_key=None if number == 1 else "k")

    scheduler = make_storage(here=True, policies={QUEUE: QueuePolicy(key_mode="keyed")})
    relay_of(scheduler).relay_once()

    assert [state(scheduler, f"job-{number}") for number in range(3)] == ["waiting", "failed", "waiting"]
    assert models.OutboxJob.objects.count() == 0
    assert "Job job-1 of queue 'default' in the outbox was refused" in caplog.text


def test_commit_wakes_the_relay(client, scheduler):
    woken = []
    scheduler.capabilities.on_outbox(lambda: woken.append(True))
    with transaction.atomic():
        enqueue(client)
        assert not woken

    assert woken


def test_scheduler_that_cannot_write_is_not_taken_for_one_that_is_away(scheduler, make_storage, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.storage.REPLY_TIMEOUT", 3)
    goes_on = threading.Event()
    journal = scheduler.scheduler.journal
    journal.wait()
    monkeypatch.setattr(scheduler.scheduler, "_timeout", 3)
    monkeypatch.setattr(journal, "flush", goes_on.wait)
    client = make_storage(timeout=3)

    try:
        enqueue(client, id="a", durable=True)
        enqueue(client, id="b")
        with pytest.raises(StorageUnavailableError, match="is not written yet"):
            client.queues.pause("other")
        enqueue(client, id="c")

        assert client.outage is None
        assert [row.job_id for row in models.OutboxJob.objects.all()] == ["a"]
        assert state(client, "b") is state(client, "c") is State.WAITING
    finally:
        monkeypatch.undo()
        goes_on.set()


def test_detached_jobs_leave_the_transaction(client):
    with transaction.atomic():
        enqueue(client, id="a", durable=False)
        assert state(client, "a") is not None


def test_workflow_cannot_be_part_of_a_transaction(client):
    with transaction.atomic(), pytest.raises(OptionError, match="depends_on"):
        client.enqueue([batch(ids=["a"]), batch(ids=["b"], depends_on=((QUEUE, "a"),))])


def test_large_batch_is_sent_in_parts(client, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.storage.PART_JOBS", 10)
    results = client.enqueue([batch(25)])

    assert [result.status for result in results] == ["queued"] * 25
    assert claim_ids(client, 100) == [result.id for result in results]


@pytest.fixture
def _small_frames(monkeypatch):
    """Frames of 10,000 bytes, half of them for payloads and results."""
    monkeypatch.setattr("djqueue.storage.wire.MAX_FRAME", 10_000)
    monkeypatch.setattr("djqueue.storage.scheduler.protocol.MAX_BYTES", 5_000)


@pytest.mark.usefixtures("_small_frames")
def test_claims_and_outcomes_may_be_larger_than_a_frame(client):
    ids = [enqueue(client, payload=bytes(1_000)) for _ in range(12)]
    found = []
    while claimed := claim(client, 12):
        found += claimed
    assert [claimed.id for claimed in found] == ids

    outcomes = [completing(claimed)._replace(result=bytes(1_000)) for claimed in found]

    assert finish(client, *outcomes[:-1]) == [True] * 11
    [accepted], _ = asyncio.run(client.afinish(outcomes[-1:], None))
    assert accepted


@pytest.mark.usefixtures("_small_frames")
def test_parts_of_a_snapshot_may_be_larger_than_a_frame(client):
    ids = {enqueue(client, payload=bytes(1_000)) for _ in range(12)}
    with client.snapshots.read() as parts:
        found = list(parts)
    jobs = [record for part in found if part.kind == JOB for record in part.records]
    assert {record["id"] for record in jobs} == ids

    whole = Part(JOB, QUEUE, jobs)
    counts = client.snapshots.write([*(part for part in found if part.kind != JOB), whole], replace=True)

    assert counts.jobs == 12


def test_second_scheduler_is_refused(scheduler, make_storage):
    with pytest.raises(SchedulerRunningError, match="--join"):
        make_storage(here=True)


def test_client_finds_the_next_scheduler(scheduler, client, make_storage):
    enqueue(client, id="a", durable=True)
    scheduler.close()
    make_storage(here=True)

    assert state(client, "a") is not None


def test_subscription_goes_on_with_the_next_scheduler(scheduler, client, make_storage):
    recorder = Recorder()
    client.events.subscribe(QUEUE, recorder)
    crash(scheduler)
    scheduler.close()
    models.LeaderLeaseRow.objects.update(expires_at=0)
    make_storage(here=True)
    eventually(lambda: enqueue(client) and recorder.events())

    recorder.until("enqueued", enqueue(client))


def test_folder_that_others_may_open_is_refused(make_storage, tmp_path):
    (tmp_path / "s").mkdir(mode=0o755)
    os.chmod(tmp_path / "s", 0o755)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        make_storage(here=True)


def test_socket_that_was_removed_is_made_again(scheduler, client, make_storage, tmp_path):
    enqueue(client, id="a")
    shutil.rmtree(tmp_path / "s")

    scheduler.maintain()

    assert state(make_storage(), "a") is not None
    assert state(client, "a") is not None


@pytest.mark.parametrize("is_link", [True, False])
def test_folder_below_one_that_another_user_made_first_is_refused(tmp_path, monkeypatch, is_link):
    """In `/tmp`, whoever comes first owns the folder above it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PrivateFolder(default_folder("default"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if is_link:
        folder.path.parent.symlink_to(elsewhere)
    else:
        folder.path.parent.mkdir(mode=0o777)
        folder.path.parent.chmod(0o777)

    with pytest.raises(ConfigurationError, match="must be a directory, not a link"):
        folder.listen(1)

    assert list(elsewhere.iterdir()) == []


def test_default_folder_is_made_with_its_parent_for_this_user_only(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PrivateFolder(default_folder("default"))

    folder.check(create=True)

    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.path.parent)] == [0o700, 0o700]


def test_running_jobs_survive_the_removal_of_the_folder(scheduler, client, tmp_path):
    enqueue(client, id="a")
    [claimed] = claim(client)
    shutil.rmtree(tmp_path / "s")

    for _ in range(2):
        scheduler.maintain()

    assert finish(client, completing(claimed)) == [True]
    assert (tmp_path / "s" / client.client.name).exists()


def test_socket_that_was_made_again_is_closed_at_once(scheduler, monkeypatch, tmp_path):
    shut, removed = server._shut, []
    monkeypatch.setattr(server, "_shut", removed.append)
    shutil.rmtree(tmp_path / "s")
    scheduler.maintain()

    monkeypatch.setattr(server, "_shut", lambda ended: [shut(each) for each in (*removed, ended)])
    scheduler.close()

    assert [listener.fileno() for listener in removed] == [-1]


def test_running_jobs_survive_the_removal_of_a_worker_s_note(scheduler, client, tmp_path):
    enqueue(client, id="a")
    [claimed] = claim(client)
    (tmp_path / "s" / client.client.name).unlink()

    scheduler.maintain()

    assert finish(client, completing(claimed)) == [True]


def test_frame_beyond_the_limit_ends_the_connection(scheduler, client):
    connection = client.client.connect(10**9)
    connection.socket.sendall(LENGTH.pack(MAX_FRAME + 1))
    with pytest.raises((EOFError, ConnectionResetError)):
        connection.receive(None)
    connection.close()


def test_jobs_of_the_database_storage_are_not_taken_over(tables, make_storage):
    models.DelayedJob.objects.create(id=1, queue=QUEUE, run_at=0)
    with pytest.raises(ConfigurationError, match="DatabaseStorage"):
        make_storage(here=True)


@pytest.fixture
def frozen(tables, make_storage, tmp_path):
    """A client of a scheduler that is suspended, with idle connections and a subscription."""
    with Child("scheduler", tmp_path / "s") as child:
        assert child.line() == "ready"
        client = make_storage(timeout=1.0)
        woken = threading.Event()
        client.listen(None, woken.set)
        for connection in [client.client.connect(monotonic() + PATIENCE) for _ in range(3)]:
            client.client._give_back(connection)
        os.kill(child.process.pid, signal.SIGSTOP)
        yield client, woken


def test_client_leaves_a_scheduler_that_hangs_for_the_next_one(frozen, make_storage):
    client, woken = frozen
    end_lease()
    scheduler = make_storage(here=True)
    with pytest.raises(StorageUnavailableError):
        counts(client)

    eventually(lambda: answers(client))
    counts(client)

    assert woken.wait(PATIENCE)  # Something may have been missed.
    woken.clear()
    enqueue(scheduler)
    assert woken.wait(PATIENCE)


@pytest.mark.usefixtures("frozen")
def test_connecting_for_a_long_operation_takes_no_longer_than_for_others(make_storage):
    with pytest.raises(StorageUnavailableError, match="does not answer"):
        make_storage(timeout=1.0).queues.obliterate(QUEUE)


def test_process_forked_by_the_scheduler_is_a_client(scheduler):
    enqueue(scheduler, id="a")

    pid = os.fork()
    if not pid:
        code = 1
        try:
            [result] = scheduler.enqueue([batch(ids=["b"])])
            code = 0 if result.status == "queued" else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert state(scheduler, "b") is not None


def test_scheduler_that_cannot_listen_releases_its_lease(make_storage, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot listen"):
        make_storage(here=True, folder=tmp_path / ("long" * 30))

    assert make_storage(here=True).scheduler is not None


def test_jobs_go_to_the_outbox_if_the_scheduler_accepts_no_more_connections(client, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.server.MAX_SESSIONS", 0)
    enqueue(client, id="a")

    assert models.OutboxJob.objects.filter(job_id="a").exists()
