"""Exchanges on an event loop: a reply always belongs to its request."""

import asyncio

import pytest
import redis

from djqueue.storage.redis.connections import Connections
from djqueue.storage.redis.exchange import Exchange
from tests.proxies import SlowProxy
from tests.support import PATIENCE, aeventually

TIMEOUT = 4


def exchange_at(url: str, timeout: float = 25.0) -> Exchange:
    return Exchange(Connections({"URL": url, "TIMEOUT": timeout}), timeout)


def test_many_requests_are_one_round_trip_with_replies_in_order(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)

        replies = await exchange.aask_many([(b"ECHO", b"%d" % number) for number in range(1_000)])

        assert replies == [b"%d" % number for number in range(1_000)]

    asyncio.run(main())


def test_error_replies_have_the_classes_of_redis_py(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)

        with pytest.raises(redis.exceptions.NoScriptError):
            await exchange.aask((b"EVALSHA", b"0" * 40, 0))
        with pytest.raises(redis.ResponseError, match="unknown command"):
            await exchange.aask((b"NONSENSE",))
        assert await exchange.aask((b"ECHO", b"after")) == b"after"

    asyncio.run(main())


def test_large_reply_is_read_in_parts(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)
        large = b"x" * 5_000_000

        assert await exchange.aask((b"ECHO", large)) == large

    asyncio.run(main())


def test_late_reply_of_a_cancelled_request_is_discarded(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)
        await exchange.aask((b"PING",))
        request = asyncio.ensure_future(exchange.aask((b"ECHO", b"first")))
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

        assert request.cancelled()
        assert await exchange.aask((b"ECHO", b"second")) == b"second"

    asyncio.run(main())


def test_request_after_a_timeout_uses_a_new_connection(redis_server):
    async def main() -> None:
        with SlowProxy(redis_server.port) as proxy:
            exchange = exchange_at(proxy.url, TIMEOUT)
            assert await exchange.aask((b"ECHO", b"before")) == b"before"
            proxy.slow_down(PATIENCE)
            with pytest.raises(redis.TimeoutError, match=r"no answer within 4 s"):
                await exchange.aask((b"ECHO", b"lost"))
            proxy.slow_down(0)

            assert await exchange.aask((b"ECHO", b"after")) == b"after"

    asyncio.run(main())


def test_each_request_has_its_own_time_limit(redis_server):
    async def main() -> None:
        with SlowProxy(redis_server.port) as proxy:
            exchange = exchange_at(proxy.url, TIMEOUT)
            await exchange.aask((b"PING",))
            proxy.slow_down(0.3 * TIMEOUT)
            for number in range(4):  # together they take longer than one may
                assert await exchange.aask((b"ECHO", b"%d" % number)) == b"%d" % number

    asyncio.run(main())


def test_closed_idle_connections_are_replaced_without_an_error(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)
        await asyncio.gather(*(exchange.aask((b"PING",)) for _ in range(5)))
        with redis.Redis.from_url(redis_server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        [idle] = exchange._spare_of.values()
        await aeventually(lambda: not any(connection.is_open for connection in idle))

        assert await exchange.aask((b"ECHO", b"after")) == b"after"

    asyncio.run(main())


def test_closed_connection_fails_the_request_in_progress(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)
        await exchange.aask((b"PING",))
        blocked = asyncio.ensure_future(exchange.aask((b"BLPOP", b"nothing", 0)))
        await asyncio.sleep(0)
        with redis.Redis.from_url(redis_server.url) as client:
            await aeventually(lambda: any(one["cmd"] == "blpop" for one in client.client_list()))
            client.client_kill_filter(_type="normal", skipme=True)

        with pytest.raises(redis.ConnectionError, match="closed"):
            await blocked

    asyncio.run(main())


def test_surplus_idle_connections_return_to_the_pool(redis_server):
    async def main() -> None:
        exchange = exchange_at(redis_server.url)
        for _ in range(2):
            replies = await asyncio.gather(*(exchange.aask((b"ECHO", b"%d" % n)) for n in range(30)))
            assert replies == [b"%d" % n for n in range(30)]
        with redis.Redis.from_url(redis_server.url) as client:
            assert len([one for one in client.client_list() if one["name"] == "djqueue"]) <= 30

    asyncio.run(main())
