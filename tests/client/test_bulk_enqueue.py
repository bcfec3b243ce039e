"""`enqueue_many` with more jobs than one call of the storage takes."""

from decimal import Decimal

import pytest

from djqueue import Queue, job
from djqueue.codecs import MSGPACK, decode, encode, get_calls_encoder
from djqueue.core.errors import PayloadTooLargeError
from djqueue.errors import ArgumentsError, SerializationError

CHUNK = 1_000


@pytest.fixture
def pay():
    @job(name="pay", queue="orders")
    def pay(order_id, *, twice=False):
        return order_id

    return pay


def waiting():
    return Queue("orders").counts()["waiting"]


def test_iterator_is_consumed_at_most_a_few_chunks_ahead(pay, do):
    ahead = []

    def calls():
        for number in range(6 * CHUNK):
            if number % CHUNK == 0:
                ahead.append(number - waiting())
            yield ((number,), {})

    results = do(pay, "enqueue_many", calls())

    assert len({result.id for result in results}) == waiting() == 6 * CHUNK
    assert max(ahead) <= 3 * CHUNK


@pytest.mark.parametrize(
    "wrong", [((), {}), 1, ((object(),), {})], ids=["missing", "no call", "unserializable"]
)
def test_error_in_an_iterator_reports_the_jobs_enqueued_before(pay, do, wrong):
    calls = (wrong if number == 2_500 else ((number,), {}) for number in range(5 * CHUNK))

    with pytest.raises((ArgumentsError, SerializationError)) as caught:
        do(pay, "enqueue_many", calls)

    assert waiting() == 2 * CHUNK
    [note] = caught.value.__notes__
    assert note.startswith("The first 2,000 jobs of this call were enqueued before the error")
    if isinstance(caught.value, ArgumentsError):
        assert "entry 2500" in str(caught.value)


def test_exception_of_an_iterator_reaches_the_caller(do):
    def payloads():
        yield from range(2_500)
        raise LookupError("the source is gone")

    with pytest.raises(LookupError, match="the source is gone") as caught:
        do(Queue("orders"), "enqueue_many", payloads())

    assert waiting() == 2 * CHUNK
    assert "first 2,000 jobs" in caught.value.__notes__[0]


def test_list_with_one_wrong_entry_stores_nothing(pay, do):
    calls = [((number,), {}) for number in range(4 * CHUNK)]
    calls[3_500] = ((), {})

    with pytest.raises(ArgumentsError, match="entry 3500") as caught:
        do(pay, "enqueue_many", calls)

    assert waiting() == 0
    assert not hasattr(caught.value, "__notes__")


def test_ids_from_an_iterator_are_paired_with_payloads(do):
    ids = (f"order-{number}" for number in range(2_500))

    results = do(Queue("orders"), "enqueue_many", range(2_500), ids=ids)

    assert [result.id for result in results] == [f"order-{number}" for number in range(2_500)]


CALLS = [
    [((1,), {}), ((2,), {})],
    [((196, 0xC4C4), {}), (("ü", None), {"a": 1.5})],
    [((), {}), (([1, {"b": (2,)}],), {"d": Decimal("1.5")})],
    [((b"\xc7\x00\x01",), {"k": [1]}), (({1: 2, None: "x"},), {})],
]


@pytest.mark.parametrize("calls", CALLS, ids=range(len(CALLS)))
def test_batch_encoding_of_calls_equals_single_encoding(calls):
    args, kwargs = [call[0] for call in calls], [call[1] for call in calls]

    found = get_calls_encoder(MSGPACK)(args, kwargs)

    assert found == [encode({"args": [*a], "kwargs": {**k}}, MSGPACK) for a, k in calls]
    assert [decode(data, MSGPACK) for data in found] == [{"args": [*a], "kwargs": k} for a, k in calls]


@pytest.mark.parametrize(
    ("wrong", "kwargs"), [(bytearray(b"x"), {}), ([memoryview(b"x")], {}), (1, {"k": {"b": bytearray(b"x")}})]
)
def test_batch_encoding_rejects_unsupported_values(wrong, kwargs):
    with pytest.raises(SerializationError, match="payload"):
        get_calls_encoder(MSGPACK)([(1,), (wrong,)], [{}, kwargs])


def test_batch_encoding_rejects_too_large_call():
    with pytest.raises(PayloadTooLargeError, match="payload"):
        get_calls_encoder(MSGPACK, 100)([(1,), ("x" * 100,)], [{}, {}])
