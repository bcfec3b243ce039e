"""Processes that die between any two of their commands."""

from contextlib import closing
from itertools import count

from djqueue.storage.redis import RedisStorage

from .conftest import BUSY


class Death(BaseException):
    """The process is gone."""


class Mortal:
    """What asks the server, for so many commands; the last answer is not heard any more."""

    def __init__(self, ask, commands):
        self._ask = ask
        self._left = commands

    def __call__(self, words):
        answer = self._ask(words)
        self._left -= 1
        if self._left <= 0:
            raise Death
        return answer


class Place:
    """Where the jobs are: makes storages of processes that die after some commands.

    given: to every storage.
    """

    def __init__(self, servers, clock=None, **given):
        self.servers = servers
        self.clock = clock
        self._given = given
        self._made = []

    def storage(self, *, commands=None, clock=None):
        made = RedisStorage(clock=clock or self.clock, **BUSY, **self._given, **self.servers.options)
        self._made.append(made)
        if commands is not None:
            exchange = made._roundtrips._exchange
            exchange.ask = Mortal(exchange.ask, commands)
        return made

    def close(self):
        while self._made:
            self._made.pop().close()

    def mortal(self):
        """A process that is born anew with as many lives, commands that is, as it is given."""
        return Reborn(self.storage())

    def deaths(self, prepare, act):
        """After each death that `act` can die, and after no death: a storage of another process.

        `prepare` makes what there is before; what it returns is given to `act` and comes with the storage.
        """
        other = self.storage()
        for commands in count(1):
            for node in getattr(self.servers, "nodes", [self.servers]):
                node.run("FLUSHALL")
            prepared = prepare(other)
            with closing(self.storage(commands=commands)) as mortal:
                try:
                    act(mortal, prepared)
                except Death:
                    died = True
                else:
                    died = False
            yield other, prepared, died
            if not died:
                assert commands > 1
                return


class Reborn:
    """See `Place.mortal`."""

    def __init__(self, storage):
        self.storage = storage
        self._ask = storage._roundtrips._exchange.ask

    def lives(self, commands):
        self.storage._roundtrips._exchange.ask = Mortal(self._ask, commands)
