"""Jobs that are staged in the tables and published together, whoever dies or does the same meanwhile."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from random import Random

import pytest
from django.db import connection, transaction

from djqueue import models
from djqueue.contrib.spark import models as spark_models
from djqueue.core.errors import QueueFullError
from djqueue.core.job import Batch
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage, staging
from djqueue.storage.staging import (
    RESUMABLE,
    STAGE_TTL,
    TAKEOVER_AFTER,
    ChunkMissingError,
    Counts,
    Manifest,
    chunks_of,
)
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.staging import APP, WRITE, fresh, place, plan, publish, publish_rest, staged
from djqueue.testing.factories import QUEUE, batch
from tests.statements import recorded
from tests.storage.clockplans import StagingOnAClock

from .test_conformance import OnAClock

PARTS, CHUNKS, JOBS = 2, 20, 5
MANIFEST = Manifest(QUEUE, APP, 1, WRITE, {str(part): staging.KIND * CHUNKS for part in range(PARTS)})
WEEK = RESUMABLE


class Died(Exception):
    """In the place of a process that ends."""


class TestStaging(OnAClock, StagingOnAClock):
    """The part of the contract."""


@pytest.fixture
def make_storage(tables):
    with ExitStack() as stack:

        def make(**options):
            return stack.enter_context(closing(DatabaseStorage(**options)))

        yield make


@pytest.fixture
def client(make_storage):
    return make_storage()


@pytest.fixture
def publisher(client) -> Iterator[subprocess.Popen]:
    """A process that publishes `MANIFEST`."""
    for part in MANIFEST.parts:
        stage(client, part)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", "tests.storage.database.publisher"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def stage(storage: DatabaseStorage, part: str) -> None:
    """One part of `MANIFEST`."""
    for number in range(CHUNKS):
        place(storage).stage(WRITE, part, number, [chunk(part, number)])


def chunk(part: str, number: int) -> Batch:
    return batch(JOBS, ids=[f"{part}-{number:02}-{at}" for at in range(JOBS)])._replace(fresh=True)


def ids() -> list[str]:
    """Of the jobs in the tables, in the order of their rows."""
    return list(models.Job.objects.order_by("id").values_list("job_id", flat=True))


def rows() -> int:
    """How many there are of what was put aside."""
    return spark_models.StagedPart.objects.count() + spark_models.StagedChunk.objects.count()


ALL = [job_id for part, number in chunks_of(MANIFEST) for job_id in chunk(part, number).ids or ()]


@pytest.mark.parametrize(
    "round_number", [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]
)
def test_publication_of_killed_publisher_is_finished_once(publisher, client, request, round_number):
    moments = Random(f"{request.config.getoption('randomly_seed', 0)} {round_number}")
    for _ in range(1 + moments.randrange(1, CHUNKS)):
        assert publisher.stdout.readline()
    threading.Event().wait(moments.uniform(0, 0.02))
    publisher.kill()
    publisher.wait()
    published = ids()
    assert published == ALL[: len(published)]
    assert len(published) % JOBS == 0, "half of a chunk came"

    found = place(client).begin(MANIFEST._replace(write="again", parts={}), None)
    answers = place(client).publish(found.manifest, chunks_of(found.manifest))

    assert (found.status, found.manifest) == ("resumed", MANIFEST)
    assert answers == [Counts(queued=JOBS)] * (PARTS * CHUNKS)
    assert place(client).end(MANIFEST) == Counts(queued=len(ALL))
    assert ids() == ALL
    assert place(client).forget(QUEUE, APP, WRITE) == PARTS
    assert rows() == 0


def test_interrupted_publication_step_changes_nothing(client, monkeypatch):
    manifest = staged(client, {"a": [fresh(3), fresh(2)]})
    place(client).begin(manifest, None)

    def dies(row):
        raise Died

    with monkeypatch.context() as patch:
        plain = place(client)._enqueue
        patch.setattr(place(client), "_enqueue", lambda *given: dies(plain(*given)))
        with pytest.raises(Died):
            place(client).publish(manifest, chunks_of(manifest))

    assert ids() == []
    assert place(client).publish(manifest, chunks_of(manifest)) == [Counts(queued=3), Counts(queued=2)]


@pytest.mark.parametrize("turn", [0, *(pytest.param(at, marks=pytest.mark.thorough) for at in range(1, 6))])
def test_concurrent_publishers_enqueue_each_job_once(make_storage, turn):
    first = make_storage()
    for part in MANIFEST.parts:
        stage(first, part)

    def run(storage):
        try:
            found = place(storage).begin(MANIFEST, None)
            return place(storage).publish(found.manifest, chunks_of(found.manifest))
        finally:
            connection.close()

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(run, [first, make_storage(), make_storage()]))

    assert answers == [[Counts(queued=JOBS)] * (PARTS * CHUNKS)] * 3
    assert ids() == ALL
    assert {place(first).end(MANIFEST) for _ in range(2)} == {Counts(queued=len(ALL))}


def test_tasks_stage_their_parts_concurrently(make_storage):
    def run(part):
        try:
            stage(make_storage(), part)
        finally:
            connection.close()

    with ThreadPoolExecutor(PARTS) as pool:
        list(pool.map(run, MANIFEST.parts))

    assert rows() == PARTS + PARTS * CHUNKS
    assert publish(make_storage(), MANIFEST) == Counts(queued=len(ALL))


def test_rolled_back_publication_is_published_again(client):
    manifest = staged(client, {"a": [fresh(3)]})
    place(client).begin(manifest, None)

    with transaction.atomic():
        place(client).publish(manifest, chunks_of(manifest))
        transaction.set_rollback(True)

    assert ids() == []
    assert place(client).publish(manifest, chunks_of(manifest)) == [Counts(queued=3)]


def test_non_durable_jobs_are_enqueued_in_publication_step(client):
    chunk = batch(2, ids=["a", "b"], durable=False)

    assert publish(client, staged(client, {"a": [chunk]})) == Counts(queued=2)

    assert ids() == ["a", "b"]


# Many queues.


def staged_in(client, names, **given):
    """Return the manifests of two jobs in each queue."""
    return [staged(client, {"a": [fresh(2, queue=name)]}, queue=name, **given) for name in names]


def steps_of(client, manifests):
    """Publish to all queues, and return the counts of the queues and the number of statements."""
    with recorded() as ran:
        place(client).begin_all(manifests, None)
        place(client).publish_all([(one, *chunk) for one in manifests for chunk in chunks_of(one)])
        ended = place(client).end_all(manifests)
    return ended, len(ran)


def test_publishing_takes_few_statements_for_each_queue(client):
    few = staged_in(client, [f"few-{number}" for number in range(5)])
    many = staged_in(client, [f"many-{number}" for number in range(45)])
    steps_of(client, staged_in(client, ["first"]))

    (counts, of_few), (more, of_many) = steps_of(client, few), steps_of(client, many)

    assert counts + more == [Counts(queued=2)] * 50
    # Three to use a queue for the first time, one more where that takes a lock, and three for its jobs.
    each = 7 if connection.vendor == "postgresql" else 6
    assert of_many - of_few < each * 40 + 10


def test_chunks_of_more_queues_are_staged_by_as_few_statements(client):
    def stage(write, many):
        chunks = [[fresh(2, queue=f"q{number}")] for number in range(many)]
        with recorded() as ran:
            place(client).stage_all(write, "a", chunks, {})
        return len(ran)

    stage("first", 1)

    assert stage("many", 50) <= stage("few", 5) + 2
    assert spark_models.StagedChunk.objects.filter(part__write="many").count() == 50


def test_rest_of_more_published_queues_is_deleted_by_as_few_statements(client):
    def forget(many):
        names = [f"{many}-{number}" for number in range(many)]
        steps_of(client, staged_in(client, names, write=f"to {many}"))
        with recorded() as ran:
            assert place(client).forget_all(names, APP, f"to {many}") == many
        return len(ran)

    forget(1)

    assert forget(50) <= forget(5) + 2
    assert rows() == 0


def test_later_write_to_many_queues_takes_place_of_earlier_one(client):
    names = [f"q{number}" for number in range(5)]
    steps_of(client, staged_in(client, names, write="one", version=1))
    done = place(client).begin_all(staged_in(client, names, write="two", version=1), None)
    assert {state.status for state in done} == {"done"}
    assert {state.manifest.write for state in done} == {"one"}

    counts, _ = steps_of(client, staged_in(client, [*names, "new"], write="three", version=2))

    assert counts == [Counts(queued=2)] * 6
    assert sorted(spark_models.Publication.objects.values_list("queue", "write", "version")) == [
        (name, "three", 2) for name in sorted([*names, "new"])
    ]


def test_one_full_queue_among_others_does_not_keep_their_jobs_back(make_storage):
    policy = QueuePolicy(max_size=3)
    client = make_storage(policies={"full": policy})
    client.enqueue([batch(2, queue="full")])
    manifests = staged_in(client, ["a", "b", "full", "z"])
    chunks = [(one, *chunk) for one in manifests for chunk in chunks_of(one)]
    place(client).begin_all(manifests, None)

    with pytest.raises(QueueFullError, match="full"):
        place(client).publish_all(chunks)
    assert client.reads.counts("a")["waiting"] == 2

    client.queues.clean("full", frozenset({State.WAITING}), 1 << 50)
    assert place(client).publish_all(chunks) == [Counts(queued=2)] * 4
    assert {name: client.reads.counts(name)["waiting"] for name in ("a", "b", "full", "z")} == dict.fromkeys(
        ("a", "b", "full", "z"), 2
    )


# Plans that several processes handle at once.


def committed(client, names=("a", "b"), **given):
    """Return a plan with two jobs in each queue, and its manifests, which are stored."""
    manifests = staged_in(client, names, **given)
    mine = plan({one.queue: one.parts for one in manifests}, **given)
    place(client).commit(mine)
    place(client).begin_all(manifests, mine.lifetime)
    return mine, manifests


def test_publisher_that_begins_while_its_plan_is_dropped_leaves_nothing(client, monkeypatch):
    mine, manifests = committed(client)
    forget = place(client).forget_all
    late = []

    def begins(*given):
        try:
            place(client).begin_all(manifests, None)
        except ChunkMissingError as error:
            late.append(error)
        return forget(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place(client), "forget_all", begins)
        assert place(client).drop(mine)

    assert len(late) == 1
    assert not spark_models.Publication.objects.exists()
    assert rows() == 0


def test_later_version_that_is_published_meanwhile_stays(client, monkeypatch):
    theirs = {"app": APP, "target": "", "version": 9, "write": "theirs"}
    mine = plan({QUEUE: {"a": staging.KIND}})
    found = place(client)._latest_plan
    turns = []

    def reads(*given):
        there = found(*given)
        if not turns:
            turns.append(None)
            spark_models.StagedWrite.objects.create(**theirs, queues=b"", done=True)
        return None if len(turns) == 1 and there is None else there

    monkeypatch.setattr(place(client), "_latest_plan", reads)

    assert place(client).commit(mine).status == "done"
    assert spark_models.StagedWrite.objects.get().version == 9


def test_publication_that_is_dropped_while_another_begins_is_started_again(client, monkeypatch):
    publish(client, staged(client, {"a": [fresh(2)]}))
    manifest = staged(client, {"a": [fresh(3)]}, write="next", version=2)
    opens = place(client)._open
    turns = []

    def conflicts(*given):
        opens(*given)
        if not turns:
            # Another process had stored a publication first, and has dropped it since.
            spark_models.Publication.objects.filter(write="next").delete()
        turns.append(None)

    monkeypatch.setattr(place(client), "_open", conflicts)

    assert place(client).begin(manifest, None).status == "new"
    assert publish_rest(client, manifest) == Counts(queued=3)
    assert len(turns) == 2


# What expires.


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def owner(tables, clock):
    with closing(DatabaseStorage(clock=clock)) as storage:
        storage.connect()
        yield storage


def test_unpublished_part_expires_with_its_first_chunk(owner, clock):
    staged(owner, {"a": [fresh(1)], "b": [fresh(1)]}, lifetime=50_000)
    clock.advance(30_000)
    staged(owner, {"a": [fresh(1), fresh(1)]}, lifetime=50_000)
    staged(owner, {"c": [fresh(1)]}, lifetime=50_000)
    manifest = MANIFEST._replace(parts={"a": staging.KIND})

    clock.advance(20_000)
    with pytest.raises(ChunkMissingError, match="expired"):
        place(owner).begin(manifest, None)
    owner.sweep()

    assert list(spark_models.StagedPart.objects.values_list("part", flat=True)) == ["c"]
    assert spark_models.StagedChunk.objects.count() == 1


def test_many_expired_parts_are_deleted_in_small_steps(owner, clock, monkeypatch):
    monkeypatch.setattr(staging, "PER_TRANSACTION", 3)
    staged(owner, {"a": [fresh(1)] * 8, "b": [fresh(1)]}, lifetime=1)
    clock.advance(1)

    deleted = [staging.delete_expired(owner.alias, clock.now(), 10) for _ in range(4)]

    assert deleted == [3, 3, 3, 2]
    assert rows() == 0


def test_started_publication_is_kept_for_week(owner, clock):
    manifest = staged(owner, {"a": [fresh(2)]}, lifetime=50_000)
    place(owner).begin(manifest, None)
    clock.advance(WEEK - 1)
    owner.sweep()
    assert place(owner).publish(manifest, chunks_of(manifest)) == [Counts(queued=2)]

    clock.advance(1)
    owner.sweep()

    assert rows() == 0
    assert place(owner).begin(manifest, None).status == "resumed", "what was begun is known until it is done"


def test_write_without_name_is_known_for_its_lifetime(owner, clock):
    manifest = staged(owner, {"a": [fresh(2)]})
    place(owner).begin(manifest, 1_000)
    place(owner).publish(manifest, chunks_of(manifest))
    place(owner).end(manifest)
    place(owner).forget(QUEUE, APP, WRITE)

    clock.advance(999)
    assert place(owner).begin(manifest, 1_000).status == "done"
    clock.advance(1)
    owner.sweep()

    assert not spark_models.Publication.objects.exists()
    with pytest.raises(ChunkMissingError):
        place(owner).begin(manifest, 1_000)


def test_part_deleted_during_publication_raises_error(owner, clock):
    manifest = staged(owner, {"a": [fresh(2)]}, lifetime=STAGE_TTL)
    place(owner).begin(manifest, None)
    clock.advance(WEEK)
    owner.sweep()

    with pytest.raises(ChunkMissingError, match="chunk 0 of part 'a' of write 'write' is missing"):
        place(owner).publish(manifest, chunks_of(manifest))

    assert ids() == []


def test_resumed_publication_is_kept_for_another_week(owner, clock):
    manifest = staged(owner, {"a": [fresh(2)]}, lifetime=50_000)
    mine = plan({QUEUE: manifest.parts}, lifetime=1_000)
    place(owner).commit(mine)
    assert place(owner).begin(manifest, mine.lifetime).status == "new"
    for _ in range(3):
        clock.advance(WEEK - 1)
        staging.delete_expired(owner.alias, clock.now(), 100)
        place(owner).touch(mine)
        assert place(owner).begin(manifest, mine.lifetime).status == "resumed"

    assert place(owner).state_of(mine) == "open"
    assert publish_rest(owner, manifest) == Counts(queued=2)


# Chunks that do not fit.


@pytest.mark.parametrize(
    "given", [[fresh(5)], [batch(3, ids=["a", "b", "c"]), batch(2, ids=["d", "e"], priority=1)]]
)
def test_chunk_above_the_maximum_size_is_added_unless_the_queue_is_full(make_storage, given):
    client = make_storage(policies={QUEUE: QueuePolicy(max_size=3)})
    kinds = place(client).stage(WRITE, "a", 0, given) + place(client).stage(WRITE, "a", 1, [fresh(4)])
    manifest = Manifest(QUEUE, APP, 1, WRITE, {"a": kinds})
    client.enqueue([batch(2)])
    place(client).begin(manifest, None)

    with pytest.raises(QueueFullError, match="allows 3 pending jobs"):
        place(client).publish(manifest, chunks_of(manifest))

    assert client.reads.counts(QUEUE)["waiting"] == 7
    client.queues.clean(QUEUE, frozenset({State.WAITING}), 1 << 50)
    assert publish_rest(client, manifest) == Counts(queued=9)


def test_job_whose_dependency_is_gone_becomes_a_dead_letter(client):
    client.enqueue([batch(1, ids=["first"])])
    chunk = [batch(1, ids=["second"], depends_on=((QUEUE, "first"),)), batch(1, ids=["third"])]
    kinds = place(client).stage(WRITE, "a", 0, chunk)
    client.jobs.remove(QUEUE, ["first"])

    assert publish(client, Manifest(QUEUE, APP, 1, WRITE, {"a": kinds})) == Counts(queued=2)

    assert client.reads.states(QUEUE, ["second", "third"]) == [State.FAILED, State.WAITING]
    [letter] = client.reads.dead_letters(QUEUE)
    assert (letter.reason, letter.error_type) == ("enqueue_rejected", "djqueue.core.errors.OptionError")


# Plans whose publishers are silent.


def test_sweep_publishes_the_rest_of_a_silent_plan(owner, clock):
    mine, manifests = committed(owner)
    place(owner).publish_all([(manifests[0], "a", 0)])
    owner.sweep()
    assert owner.reads.counts("b")["waiting"] == 0

    clock.advance(TAKEOVER_AFTER)
    owner.sweep()

    assert {name: owner.reads.counts(name)["waiting"] for name in ("a", "b")} == {"a": 2, "b": 2}
    assert place(owner).state_of(mine) == "done"
    assert rows() == 0


def test_sweep_drops_a_silent_plan_whose_jobs_have_expired(owner, clock):
    mine, _ = committed(owner)
    spark_models.StagedPart.objects.update(expires_at=0)
    spark_models.Publication.objects.all().delete()
    clock.advance(TAKEOVER_AFTER)

    owner.sweep()

    assert place(owner).state_of(mine) == ""
    assert rows() == 0
