"""Events of jobs, as Redis publishes them."""

from djqueue.storage.facets import EventHandler, Events, Unsubscribe

from .pubsub import Notifications


class RedisEvents(Events):
    """Subscriptions to the channels of queues and jobs."""

    def __init__(self, notifications: Notifications) -> None:
        self._notifications = notifications

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._notifications.subscribe(queue, handler, job_id)
