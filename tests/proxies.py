"""A proxy that loses what a server answers, or what it is asked."""

import selectors
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Event, Thread
from typing import Self

REQUESTS, ANSWERS = "requests", "answers"


class LossyProxy:
    """Passes bytes between clients and a server on loopback; `with` starts and ends it.

    answers, requests: after how many bytes of all answers, or requests, the connection ends that they come
    on. What comes before is passed on. Each cut is made once.
    """

    def __init__(self, target: int, answers: Iterable[int] = (), requests: Iterable[int] = ()) -> None:
        self._target = target
        self._cuts = {ANSWERS: sorted(answers), REQUESTS: sorted(requests)}
        self.passed = {ANSWERS: 0, REQUESTS: 0}
        """Bytes so far."""
        self.made = 0
        """Cuts so far."""

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._bell, rope = socket.socketpair()
        self._rope = rope
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._rope.close()
        self._thread.join()

    @property
    def url(self) -> str:
        """For a Redis behind it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj.fileno() >= 0:  # not one that has been cut in this round
                        self._pass(key.fileobj, *key.data)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()
            self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, (server, REQUESTS))
        self._selector.register(server, selectors.EVENT_READ, (client, ANSWERS))

    def _pass(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        cuts = self._cuts[direction]
        is_over = not data
        if cuts and self.passed[direction] + len(data) > cuts[0]:
            data, is_over = data[: max(0, cuts.pop(0) - self.passed[direction])], True
            self.made += 1
        self.passed[direction] += len(data)
        try:
            target.sendall(data)
        except OSError:
            is_over = True
        if is_over:
            for end in (source, target):
                self._selector.unregister(end)
                end.close()


class SlowProxy:
    """Passes bytes between clients and a server on loopback; `with` starts and ends it.

    delay: seconds that it keeps each piece of an answer. After `swallow` it takes everything and passes
    nothing on, as a network does that drops packets.
    """

    def __init__(self, target: int, delay: float = 0) -> None:
        self._target = target
        self._delay = delay
        self._is_black = False
        self._over = Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        for end in list(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [*self._sockets, self._listener]:
            end.close()

    @property
    def url(self) -> str:
        """For a Redis behind it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def slow_down(self, delay: float) -> None:
        """Keep each piece of an answer for so many seconds from now on."""
        self._delay = delay

    def refuse(self) -> None:
        """End all connections, and take no others."""
        self._listener.close()
        for end in list(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Pass nothing on any more."""
        self._is_black = True

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            client.settimeout(None)
            self._sockets.append(client)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                continue
            self._sockets.append(server)
            self._start(self._pass, client, server, lambda: 0)
            self._start(self._pass, server, client, lambda: self._delay)

    def _pass(self, source: socket.socket, target: socket.socket, delay: Callable[[], float]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if delay() and self._over.wait(delay()):
                    break
                if not self._is_black:
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
