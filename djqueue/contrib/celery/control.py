"""Celery's remote control in a worker of djqueue: `celery inspect`, `revoke` and `terminate`."""

import logging
import threading
from typing import Any

from celery import Celery
from celery.utils.collections import AttributeDict
from celery.worker.control import Panel

from djqueue.core.messages import in_one_line

logger = logging.getLogger("djqueue.celery")

COMMANDS = (
    "ping",
    "registered",
    "active",
    "reserved",
    "revoked",
    "query_task",
    "clock",
    "revoke",
    "revoke_by_stamped_headers",
    "terminate",
)
"""Commands that need nothing of Celery's own worker; others are answered with an error."""
ROUND = 1.0
"""Seconds within which the thread notices that it should end."""
RETRY = 5.0
"""Seconds before the next attempt if the broker is unavailable."""


class ControlThread:
    """Receives commands of `app.control`, and answers them."""

    def __init__(self, app: Celery, hostname: str, pool: Any) -> None:
        self._app = app
        self._stop = threading.Event()
        consumer = AttributeDict(app=app, hostname=hostname, pool=pool)
        self._node = app.control.mailbox.Node(
            hostname,
            handlers={name: Panel.data[name] for name in COMMANDS if name in Panel.data},
            state=AttributeDict(app=app, hostname=hostname, consumer=consumer, tset=set),
        )
        self._thread = threading.Thread(target=self._run, name="djqueue-celery-control", daemon=True)

    def start(self) -> None:
        """Begin to receive commands."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait until the thread has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:
                logger.warning(
                    "Celery's remote control is unavailable, retrying in %g s: %s", RETRY, in_one_line(error)
                )
                self._stop.wait(RETRY)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            self._node.channel = connection.channel()
            consumer = self._node.listen(callback=self._on_message)
            try:
                while not self._stop.is_set():
                    try:
                        connection.drain_events(timeout=ROUND)
                    except TimeoutError:
                        continue
            finally:
                consumer.cancel()

    def _on_message(self, body: Any, message: Any) -> None:
        self._app.clock.forward()
        try:
            self._node.handle_message(body, message)
        except KeyError as error:
            logger.warning("Celery's remote control: unknown command %s.", error)
        except Exception as error:
            # A command that fails must not keep later ones from being answered.
            logger.error("Celery's remote control: a command failed: %s", in_one_line(error))
