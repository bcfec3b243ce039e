"""Codecs of the project: they may raise, block, and query the database, also for async callers."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from kombu import serialization

from djqueue import Queue, flow, job
from djqueue.client.storages import get_storage
from djqueue.codecs import decode, encode
from djqueue.errors import SerializationError
from tests.runtime.running import working
from tests.support import PATIENCE

TYPE = "application/x-odd"


class UnreadableError(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError


def raising(error: BaseException) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


class OddCodec:
    """A codec whose functions a test replaces."""

    encode: Callable[[Any], Any] = staticmethod(json.dumps)
    decode: Callable[[Any], Any] = staticmethod(json.loads)


@pytest.fixture
def codec(settings: Any) -> Iterator[OddCodec]:
    codec = OddCodec()
    settings.DJQUEUE = {**settings.DJQUEUE, "ACCEPT_CONTENT": ["application/x-djqueue-msgpack", TYPE]}
    serialization.register(
        "odd", lambda value: codec.encode(value), lambda data: codec.decode(data), TYPE, "utf-8"
    )
    yield codec
    serialization.unregister("odd")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (raising(ValueError("no")), "no"),
        (raising(UnreadableError()), "cannot be shown"),
        (raising(MemoryError()), "MemoryError"),
        (lambda _: None, "returned a NoneType instead of str or bytes"),
        (lambda _: 5, "returned an int"),
        (lambda _: "\ud800", "surrogates"),
    ],
)
def test_whatever_a_codec_does_is_an_error_that_names_it(
    codec: OddCodec, fails: Callable[[Any], Any], reason: str
) -> None:
    codec.encode = fails
    with pytest.raises(SerializationError, match=f"cannot be encoded as odd: .*{reason}"):
        encode({"a": 1}, TYPE)


@pytest.mark.parametrize("error", [UnreadableError(), StopIteration(), RecursionError()])
def test_value_that_a_codec_cannot_read_is_refused(codec: OddCodec, error: Exception) -> None:
    codec.decode = raising(error)
    with pytest.raises(SerializationError, match="not a value encoded as odd: "):
        decode(b"{}", TYPE)


def querying(codec: OddCodec) -> list[threading.Thread]:
    """Let a codec query the database, and return the threads on which it does."""
    threads: list[threading.Thread] = []

    def slow_dumps(value: Any) -> str:
        threads.append(threading.current_thread())
        return json.dumps([User.objects.count(), value])

    def slow_loads(data: Any) -> Any:
        threads.append(threading.current_thread())
        return json.loads(data)[User.objects.count() + 1]

    codec.encode, codec.decode = slow_dumps, slow_loads
    return threads


@pytest.mark.django_db(transaction=True)
def test_codecs_of_async_callers_may_query_the_database(codec: OddCodec) -> None:
    threads = querying(codec)
    queue = Queue("odd", content_type=TYPE)
    odd = job(name="odd", queue="odd", content_type=TYPE)(lambda n: n)

    async def answers() -> list[Any]:
        async def answer(job: Any) -> Any:
            [n] = job.payload.get("args") or [job.payload["n"]]
            return n + 1

        async with working(get_storage(), {"odd": answer}):
            found = [await queue.aenqueue_and_wait({"n": 1})]
            enqueued = [
                *await queue.aenqueue_many([{"n": 2}]),
                await queue.aenqueue({"n": 3}),
                *await flow(queue.node({"n": 4})).aenqueue(),
                *await queue.aenqueue_many(iter([{"n": 5}])),
                *await odd.aenqueue_many(((n,), {}) for n in (6, 7)),
            ]
            found += [await one.await_(PATIENCE) for one in enqueued]
        assert threading.current_thread() not in threads
        return found

    assert async_to_sync(answers)() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.django_db(transaction=True)
def test_codecs_of_async_streams_run_off_the_loop(codec: OddCodec) -> None:
    threads = querying(codec)
    queue = Queue("odd", content_type=TYPE)
    odd = job(name="odd", queue="odd", content_type=TYPE)(lambda n: n)

    async def items() -> list[Any]:
        async def generate(job: Any) -> Any:
            [n] = job.payload.get("args") or [job.payload["n"]]
            for number in range(n):
                yield number

        async with working(get_storage(), {"odd": generate}):
            streams = [queue.aenqueue_and_stream({"n": 2}, wait=PATIENCE), odd.aenqueue_and_stream(3)]
            found = [[item async for item in stream] for stream in streams]
        assert threading.current_thread() not in threads
        return found

    assert async_to_sync(items)() == [[0, 1], [0, 1, 2]]
    assert threads
