"""Enqueueing through `@job`, and the results."""

import asyncio
from datetime import date
from decimal import Decimal
from uuid import UUID

import pytest

from djqueue import EnqueueResult, Queue, State, job
from djqueue.errors import OptionError, PayloadTooLargeError, SerializationError
from djqueue.testing.factories import claim_one, completing, failing, finish


@pytest.fixture
def pay():
    @job(name="pay", queue="orders")
    def pay(order_id, *, twice=False):
        return order_id

    return pay


@pytest.fixture
def take():
    @job(name="take", queue="orders")
    def take(*args, **kwargs):
        return args, kwargs

    return take


def complete(storage, result, content_type="application/x-djqueue-msgpack"):
    from djqueue.codecs import encode

    claimed = claim_one(storage, names=["pay", "orders"])
    assert finish(storage, completing(claimed, encode(result, content_type))) == [True]


def test_enqueue_returns_the_id_of_the_new_job(pay, storage, do):
    answer = do(pay, "enqueue", 42, twice=True)

    assert answer == EnqueueResult(answer.id, "queued", "orders")
    assert UUID(answer.id).version == 7
    info = Queue("orders").get_job(answer.id)
    assert (info.name, info.state, info.queue) == ("pay", State.WAITING, "orders")
    assert info.payload == {"args": [42], "kwargs": {"twice": True}}


def test_arguments_are_stored_unchanged(take):
    arguments = (None, True, 2**63, 1.5, "größer", b"\0\xff", [1], (2,), {"k": date(2026, 1, 2)})

    answer = take.enqueue(*arguments, price=Decimal("1.10"))

    payload = Queue("orders").get_job(answer.id).payload
    assert tuple(payload["args"]) == arguments
    assert payload["kwargs"] == {"price": Decimal("1.10")}


def test_enqueue_of_existing_id_returns_duplicate(pay, do):
    order = pay.using(id="order:1")
    do(order, "enqueue", 1)

    answer = do(order, "enqueue", 2)

    assert answer == EnqueueResult("order:1", "duplicate", "orders", State.WAITING)
    assert Queue("orders").get_job("order:1").payload["args"] == [1]


def test_enqueue_with_taken_unique_key_returns_its_owner(pay, do):
    first = do(pay.using(unique_key="k"), "enqueue", 1)

    answer = do(pay.using(unique_key="k", id="other"), "enqueue", 2)

    assert answer == EnqueueResult(first.id, "duplicate", "orders", State.WAITING)


@pytest.mark.parametrize("result", [None, False, 0, "", [], {"n": (1, 2)}, b"\xff", "x" * 100_000])
def test_enqueue_of_completed_id_returns_its_decoded_result(pay, storage, do, result):
    order = pay.using(id="order:1")
    order.enqueue(1)
    complete(storage, result)

    answer = do(order, "enqueue", 1)

    assert answer == EnqueueResult("order:1", "completed", "orders", State.COMPLETED, result)
    assert type(answer.result) is type(result)


def test_result_is_decoded_with_the_codec_of_the_job_that_ran(pay, storage, do):
    """Not by that of the enqueue that finds it."""
    pay.using(id="order:1", content_type="application/json").enqueue(1)
    complete(storage, {"n": 1}, "application/json")

    answer = do(pay.using(id="order:1"), "enqueue", 1)

    assert (answer.status, answer.result) == ("completed", {"n": 1})


def test_failed_id_can_be_enqueued_again(pay, storage, do):
    order = pay.using(id="order:1")
    order.enqueue(1)
    finish(storage, failing(claim_one(storage, names=["pay"])))

    assert do(order, "enqueue", 2).status == "queued"
    assert Queue("orders").get_job("order:1").payload["args"] == [2]


@pytest.mark.parametrize("number", [0, 1, 999, 2_500])
def test_enqueue_many_keeps_the_order_of_calls(pay, do, number):
    calls = (((n,), {"twice": bool(n % 2)}) for n in range(number))

    answers = do(pay, "enqueue_many", calls)

    assert [answer.status for answer in answers] == ["queued"] * number
    infos = [Queue("orders").get_job(answer.id) for answer in answers]
    assert [info.payload["args"] for info in infos] == [[n] for n in range(number)]
    assert Queue("orders").counts()["waiting"] == number


def test_enqueue_many_with_one_id_stores_one_job(pay, storage, do):
    order = pay.using(id="order:1")

    answers = do(order, "enqueue_many", [((1,), {}), ((2,), {})])

    assert [answer.status for answer in answers] == ["queued", "duplicate"]
    complete(storage, {"n": 1})
    [answer] = do(order, "enqueue_many", [((3,), {})])
    assert (answer.status, answer.result) == ("completed", {"n": 1})


def test_enqueue_many_with_ids_returns_decoded_results(storage, do):
    queue = Queue("orders")
    queue.enqueue(1, id="a")
    complete(storage, {"n": 1})

    answers = do(queue, "enqueue_many", ["x", "y"], ids=["a", "b"])

    assert [(answer.status, answer.result) for answer in answers] == [
        ("completed", {"n": 1}),
        ("queued", None),
    ]


def test_unserializable_argument_is_rejected_with_its_path(take, storage, do):
    with pytest.raises(SerializationError, match=r"payload\.args\[1\]\.items\[2\]\.file"):
        do(take, "enqueue", 1, {"items": [0, 1, {"file": object()}]})
    with pytest.raises(SerializationError, match=r"payload\.kwargs\.when"):
        do(take, "enqueue", when=lambda: None)
    assert storage.queues.names() == []


@pytest.mark.parametrize("place", [0, 1, 1_200])
def test_enqueue_many_with_unserializable_call_stores_nothing(pay, storage, do, place):
    calls = [((object() if n == place else n,), {}) for n in range(1_500)]

    with pytest.raises(SerializationError, match=r"payload\.args\[0\]"):
        do(pay, "enqueue_many", calls)
    with pytest.raises(SerializationError, match="payload"):
        do(Queue("orders"), "enqueue_many", [args[0] for args, _ in calls])
    assert Queue("orders").counts()["waiting"] == 0


def test_too_large_payload_is_rejected(pay, storage, do):
    with pytest.raises(PayloadTooLargeError, match="payload"):
        do(pay, "enqueue", "x" * (1024 * 1024))
    assert storage.queues.names() == []
    assert do(pay, "enqueue", "x" * (1024 * 1024 - 100)).status == "queued"


def test_max_payload_setting_limits_payloads(pay, settings, do):
    settings.DJQUEUE = {**settings.DJQUEUE, "MAX_PAYLOAD": 100}

    with pytest.raises(PayloadTooLargeError, match="100"):
        do(pay, "enqueue", "x" * 100)
    assert do(pay, "enqueue", "x" * 50).status == "queued"


def test_job_can_use_another_codec(pay, storage):
    answer = pay.using(content_type="application/json").enqueue(1, twice=True)

    [record] = storage.reads.jobs("orders", [answer.id])
    assert record.payload.replace(b" ", b"") == b'{"args":[1],"kwargs":{"twice":true}}'
    assert Queue("orders").get_job(answer.id).payload == {"args": [1], "kwargs": {"twice": True}}


def test_codec_setting_selects_the_codec(pay, storage, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "CODEC": "application/json"}

    answer = pay.enqueue(1)

    assert Queue("orders").get_job(answer.id).options.content_type == "application/json"


def test_option_name_passed_to_enqueue_is_an_argument_of_the_function(take):
    """Options belong to `using`: whatever an enqueue is given goes to the function."""
    answer = take.enqueue(1, priority=9)

    assert Queue("orders").get_job(answer.id).payload["kwargs"] == {"priority": 9}


def test_coroutines_can_enqueue_concurrently(pay):
    async def enqueue():
        return await asyncio.gather(*(pay.aenqueue(number) for number in range(100)))

    answers = asyncio.run(enqueue())

    assert len({answer.id for answer in answers}) == 100
    assert Queue("orders").counts()["waiting"] == 100


def test_delays_and_priorities_reach_storage(pay):
    answer = pay.using(delay=60, priority=4, tags=["x"]).enqueue(1)

    info = Queue("orders").get_job(answer.id)
    assert info.state == "delayed"
    assert (info.run_at - info.created_at).total_seconds() == 60
    assert (info.options.priority, info.options.tags) == (4, ("x",))


def test_missing_dependency_is_rejected(pay, storage, do):
    with pytest.raises(OptionError, match=r"depends_on.*'ghost'"):
        do(pay.using(depends_on=[("orders", "ghost")]), "enqueue", 1)
    assert Queue("orders").counts()["waiting"] == 0
