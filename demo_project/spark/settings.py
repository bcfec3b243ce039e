"""The demo project's settings, with jobs in a Redis and the mirror of it in the tables."""

import os
from datetime import timedelta

from demo_project.settings import *  # noqa: F403

REDIS_URL = os.environ["DJQUEUE_DEMO_REDIS"]

KEPT = timedelta(days=20)
"""For how long a further run finds what this one has done."""

DJQUEUE = {
    "STORAGE": {
        "BACKEND": "djqueue.storage.redis.RedisStorage",
        "OPTIONS": {"URL": REDIS_URL, "MIRROR": {"RETENTION": KEPT}},
    },
    "QUEUES": {"claims": {"DEAD_LETTERS": {"TTL": KEPT}}},
}
