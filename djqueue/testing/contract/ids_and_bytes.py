"""Ids, names and bytes: every accepted value is stored unchanged."""

from typing import Any
from uuid import UUID

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    lease_of,
    report_of,
    state,
)
from .case import StorageCase, recorded, so_far

ODD = [
    "user:42",
    "a:b:c:",
    ":",
    "{a}",
    "{q:default}:waiting",
    "}{",
    "*",
    "[a-z]?",
    "%s %d %",
    "'; DROP TABLE jobs; --",
    'double "quotes"',
    "back\\slash",
    "../../etc/passwd",
    "two\nlines\r\n",
    "tab\there",
    " leading and trailing ",
    "Größe",
    "日本語",
    "עברית",
    "e\u0301 is not \u00e9",
    "\U0001f469\u200d\U0001f680 \U0001f4a5",
    "\u200b",
    "\x7f\x01",
    "None",
    "0",
    "null",
    "x" * 255,
    "\U0001f4a5" * 255,
]
ALIKE = [
    "job",
    "Job",
    "JOB",
    "job ",
    " job",
    "job\t",
    "j\u00f6b",
    "jo\u0308b",
    "jöB",
    "ｊob",
    "job\u200b",
]
EVERY_BYTE = bytes(range(256))


def _short(text: str) -> str:
    return ascii(text[:20])


class IdsAndBytesContract(StorageCase):
    """Cases about what jobs and queues are called, and what they carry."""

    def test_generated_ids_are_uuids_in_order_of_time(self, storage: Storage) -> None:
        ids = [enqueue(storage) for _ in range(20)] + enqueue_many(storage, 5_000)
        self.advance(5)
        ids += [enqueue(storage, delay=1), *enqueue_many(storage, 5)]

        assert ids == sorted(ids)
        assert len(set(ids)) == len(ids)
        assert {UUID(job_id).version for job_id in ids} == {7}
        assert ids == [str(UUID(job_id)) for job_id in ids]

    def test_unusual_job_id_works_in_every_operation(self, storage: Storage) -> None:
        for job_id in ODD:
            with recorded(storage, job_id=job_id) as its_own, recorded(storage) as all_of_them:
                assert storage.enqueue([batch(ids=[job_id])])[0].id == job_id
                assert storage.enqueue([batch(ids=[job_id])])[0].status == "duplicate"
                claimed = claim_one(storage)
                assert claimed.id == job_id
                assert storage.renew([lease_of(claimed)])[0].held
                assert storage.report([report_of(claimed, 1)]) == [True]
                assert finish(storage, failing(claimed)) == [True]
                assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == [job_id]
                assert storage.jobs.retry(QUEUE, [job_id]) == ["retried"]
                assert finish(storage, completing(claim_one(storage))) == [True]
                assert job(storage, job_id).id == job_id
                assert storage.jobs.remove(QUEUE, [job_id]) == [True]
                its_own.until("removed", job_id)
                so_far(storage, all_of_them)

            words = ["enqueued", "started", "progress", "failed", "requeued", "started", "completed"]
            assert its_own.words(job_id) == all_of_them.words(job_id) == [*words, "removed"]
            assert counts(storage) == {}

    def test_unusual_queue_name_works_in_every_operation(self, storage: Storage) -> None:
        for queue in ODD:
            with recorded(storage, queue) as recorder:
                enqueue_many(storage, 2, queue=queue)
                assert queue in storage.queues.names()
                claimed = claim(storage, 5, queues=[queue])
                assert {one.queue for one in claimed} == {queue}
                assert finish(storage, *map(completing, claimed)) == [True, True]
                assert counts(storage, queue) == {State.COMPLETED: 2}
                storage.queues.pause(queue)
                assert storage.queues.is_paused(queue)
                assert [event.queue for event in so_far(storage, recorder, queue)] == [queue] * 6

            assert storage.queues.obliterate(queue) == 2
            assert queue not in storage.queues.names()

    def test_unusual_names_keys_and_tags_are_stored_unchanged(self, storage: Storage) -> None:
        for text in ODD:
            given: dict[str, Any] = {
                "name": text,
                "unique_key": text,
                "concurrency_key": text,
                "tags": (text,),
            }
            job_id = enqueue(storage, **given)

            assert storage.enqueue([batch(**given)])[0].id == job_id
            assert storage.reads.waiting_names(QUEUE) == {text: 1}
            claimed = claim_one(storage, names=[text], worker=text)
            assert (claimed.name, claimed.options.concurrency_key, claimed.options.tags) == (
                text,
                text,
                (text,),
            )
            assert job(storage, job_id).worker == text
            finish(storage, failing(claimed, reason="unknown"))
            assert job(storage, job_id).options.unique_key == text

    def test_dependencies_with_unusual_names_are_met(self, storage: Storage) -> None:
        for number, text in enumerate(ODD):
            enqueue(storage, queue=text, id=text)
            job_id = enqueue(storage, id=f"dependent {number}", depends_on=((text, text),))
            assert state(storage, job_id) is State.BLOCKED

            finish(storage, completing(claim_one(storage, queues=[text])))

            assert claim_ids(storage) == [f"dependent {number}"]

    def test_similar_ids_are_different_jobs(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(ids=ALIKE, payloads=[text.encode() for text in ALIKE])])

        assert {answer.status for answer in answers} == {"queued"}
        claimed = claim(storage, 100)
        assert [one.id for one in claimed] == ALIKE
        finish(storage, *(completing(one, one.payload) for one in claimed))
        for text in ALIKE:
            assert job(storage, text).result == text.encode()
        assert storage.jobs.remove(QUEUE, ALIKE[:1]) == [True]
        assert counts(storage) == {State.COMPLETED: len(ALIKE) - 1}

    def test_similar_queue_names_are_different_queues(self, storage: Storage) -> None:
        before = {*storage.queues.names()}
        for text in ALIKE:
            enqueue(storage, queue=text, id="same", payload=text.encode())

        assert {*storage.queues.names()} - before == {*ALIKE}
        for text in ALIKE:
            assert claim_one(storage, queues=[text]).payload == text.encode()
        assert claim(storage, 100) == []

    @pytest.mark.parametrize(
        "payload",
        [b"", b"\0", EVERY_BYTE, EVERY_BYTE[::-1], b"\xff\xfe", b"\xc3\x28", b"{json?", b"\r\n"],
        ids=lambda payload: repr(payload[:8]),
    )
    def test_payload_and_result_bytes_are_stored_unchanged(self, storage: Storage, payload: bytes) -> None:
        job_id = enqueue(storage, payload=payload)
        claimed = claim_one(storage)
        finish(storage, completing(claimed, payload))

        record = job(storage, job_id)
        assert claimed.payload == record.payload == record.result == payload

    def test_mebibyte_of_payload_and_result_is_stored_unchanged(self, storage: Storage) -> None:
        payload = EVERY_BYTE * 4_096
        job_id = enqueue(storage, payload=payload)
        claimed = claim_one(storage)
        finish(storage, completing(claimed, payload[::-1]))

        assert claimed.payload == payload
        record = job(storage, job_id)
        assert record.payload == payload
        assert record.result == payload[::-1]

    def test_payloads_of_one_batch_are_not_mixed_up(self, storage: Storage) -> None:
        payloads = [bytes([number]) * number for number in range(256)]
        enqueue_many(storage, 256, payloads=payloads)

        assert [one.payload for one in claim(storage, 256)] == payloads
