"""New jobs of several batches, inserted by a process that is not the scheduler."""

import pytest
from django.db import IntegrityError

from djqueue import models
from djqueue.testing.factories import batch

pytestmark = pytest.mark.dialect


@pytest.fixture
def inserted(client, monkeypatch):
    """Return the numbers of jobs in the statements that insert new jobs."""
    numbers = []
    insert = type(client._dialect).insert

    def counting(self, model, fields, given, **more):
        if model is models.Job:
            numbers.append(len(given))
        insert(self, model, fields, given, **more)

    monkeypatch.setattr(type(client._dialect), "insert", counting)
    return numbers


def stored():
    return list(models.Job.objects.order_by("id").values_list("queue", "job_id"))


def test_new_jobs_of_many_queues_are_inserted_together_in_order(client, inserted):
    batches = [fresh(["a", "b"], queue=f"q{number}") for number in range(50)]

    answers = client.enqueue(batches)

    assert [(one.queue, one.id, one.status) for one in answers] == [
        (f"q{number}", name, "queued") for number in range(50) for name in "ab"
    ]
    assert stored() == [(one.queue, one.id) for one in answers]
    assert inserted == [100]


def test_insert_statement_is_limited_in_jobs_and_bytes(client, inserted):
    client.enqueue([fresh(map(str, range(400)), queue=f"q{number}") for number in range(4)])
    client.enqueue([batch(payloads=[b"x" * 700_000], queue=f"r{number}") for number in range(3)])

    assert inserted == [1_200, 400, 2, 1]


def test_batch_that_looks_for_jobs_finds_those_before_it_in_same_call(client):
    first, later = fresh(["a"]), batch(ids=["a", "b"])

    answers = client.enqueue([first, later, fresh(["c"]), batch(ids=["c"])])

    assert [(one.id, one.status) for one in answers] == [
        ("a", "queued"),
        ("a", "duplicate"),
        ("b", "queued"),
        ("c", "queued"),
        ("c", "duplicate"),
    ]
    assert [job_id for _, job_id in stored()] == ["a", "b", "c"]


def test_id_that_is_called_fresh_twice_is_error_and_adds_nothing(client):
    with pytest.raises(IntegrityError):
        client.enqueue([fresh(["a"]), fresh(["a"])])

    assert stored() == []


def fresh(ids, **options):
    """Return a batch of jobs whose ids are new."""
    return batch(ids=list(ids), **options)._replace(fresh=True)
