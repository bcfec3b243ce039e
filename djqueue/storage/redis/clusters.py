"""The clients of a Redis Cluster, with what redis-py's own lack.

They are given no retries. redis-py uses those only to send a command again whose answer was lost, and so
might run a script twice; what a node refuses with MOVED, ASK or TRYAGAIN is sent on in any case, up to 16
times for a command. Two things no option changes (redis-py 8.1): a pipeline of the synchronous client
sends once more what was not answered, and one of the asynchronous client never asks for the nodes anew
when one is gone. Single commands do neither.
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
    """A client whose errors of the moment are redis-py's usual ones, and that takes a command's name as
    bytes."""

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """See redis-py."""
        try:
            return super().execute_command(  # type: ignore[no-untyped-call]
                _text(args[0]), *args[1:], **kwargs
            )
        except (RedisClusterException, ClusterError) as error:
            raise (_passing(error) or error) from error.__cause__


class AsyncClusterClient(AsyncRedisCluster):
    """The same for asyncio; and a command for a slot on the move arrives where it is sent on to."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """See redis-py."""
        try:
            return await super().execute_command(_text(args[0]), *args[1:], **kwargs)
        except (RedisClusterException, ClusterError) as error:
            raise (_passing(error) or error) from error.__cause__

    async def _execute_command(self, target_node: Any, *args: Any, **kwargs: Any) -> Any:
        node: Any = _AskedNode(self, target_node)
        return await super()._execute_command(node, *args, **kwargs)


class _AskedNode:
    """A node that follows ASK by itself.

    redis-py sends ASKING and the command one after the other, each on the connection that has been free
    for longest. Those are two if an even number is free, and so the command is refused each time.
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
            asked = self._client.get_node(*error.node_addr)
            if asked is None:
                raise
        commands = [PipelineCommand(0, "ASKING"), PipelineCommand(1, *args)]
        await asked.execute_pipeline(commands)
        answer = commands[1].result
        if isinstance(answer, Exception):
            raise answer
        return answer


def _text(command: Any) -> Any:
    return command.decode() if isinstance(command, bytes) else command


def _passing(error: Exception) -> redis.RedisError | None:
    """The usual error for one that may be over in a moment; None if something is wrong with the command."""
    if isinstance(error, SlotNotCoveredError):
        return redis.ConnectionError(str(error))
    if isinstance(error, RedisClusterException) and error.__cause__ is not None:
        return redis.ConnectionError(str(error))  # no node could be reached
    if type(error) is ClusterError:
        return TryAgainError("the cluster slot is being moved")  # the command was sent on too often
    return None
