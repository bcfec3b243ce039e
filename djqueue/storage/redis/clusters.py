"""Clients of a Redis Cluster that add what those of redis-py lack.

They have no retries: redis-py would repeat commands whose reply was lost, and might run a script twice. It
follows MOVED, ASK and TRYAGAIN in any case, up to 16 times for a command. No option changes two things
(redis-py 8.1): a pipeline of the synchronous client repeats commands without a reply, and one of the
asynchronous client never reads the nodes again when one is gone. Single commands do neither.
"""

from typing import Any

import redis
from redis.asyncio.cluster import PipelineCommand
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    RedisClusterException,
    SlotNotCoveredError,
    TryAgainError,
)


class ClusterClient(RedisCluster):
    """A client with redis-py's usual errors for temporary failures, which takes command names as bytes."""

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().execute_command(  # type: ignore[no-untyped-call]
                _text(args[0]), *args[1:], **kwargs
            )
        except (RedisClusterException, ClusterError) as error:
            raise (_passing(error) or error) from error.__cause__


class AsyncClusterClient(AsyncRedisCluster):
    """The same for asyncio. Commands for a slot that is moving reach the node that ASK names."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(_text(args[0]), *args[1:], **kwargs)
        except (RedisClusterException, ClusterError) as error:
            raise (_passing(error) or error) from error.__cause__

    async def _execute_command(self, target_node: Any, *args: Any, **kwargs: Any) -> Any:
        node: Any = _AskedNode(self, target_node)
        return await super()._execute_command(node, *args, **kwargs)


class _AskedNode:
    """A node that follows ASK.

    redis-py sends ASKING and the command one after the other, each on the connection that has been free
    for longest. These are two connections if several are free, and the command is refused.
    """

    def __init__(self, client: AsyncClusterClient, node: Any) -> None:
        self._client = client
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._node.execute_command(*args, **kwargs)
        except MovedError:  # a kind of AskError
            raise
        except AskError as error:
            target = self._client.get_node(*error.node_addr)
            if target is None:
                raise
        commands = [PipelineCommand(0, "ASKING"), PipelineCommand(1, *args)]
        await target.execute_pipeline(commands)
        answer = commands[1].result
        if isinstance(answer, Exception):
            raise answer
        return answer


def _text(command: Any) -> Any:
    return command.decode() if isinstance(command, bytes) else command


def _passing(error: Exception) -> redis.RedisError | None:
    """Return the usual error for a temporary one; None if something is wrong with the command."""
    if isinstance(error, SlotNotCoveredError):
        return redis.ConnectionError(str(error))
    if isinstance(error, RedisClusterException) and error.__cause__ is not None:
        return redis.ConnectionError(str(error))  # no node could be reached
    if type(error) is ClusterError:
        return TryAgainError("the cluster slot is being moved")  # the command was redirected too often
    return None
