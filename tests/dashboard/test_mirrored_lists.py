"""Lists of jobs mirrored from Redis: an open page changes when the mirrored rows do."""

from typing import Any

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.dashboard import reading
from djqueue.dashboard.reading import read_cache
from djqueue.operations.mirror import mirror_of
from tests import servers
from tests.dashboard.visiting import PAGES, address, logged_in, make_superuser

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture(autouse=True)
def _redis(settings: Any, monkeypatch: pytest.MonkeyPatch, redis_server: servers.RedisServer) -> None:
    monkeypatch.setattr(reading, "MINUTE", 10**12)
    redis_server.clean()
    options = {"URL": redis_server.url}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}}


def test_list_of_mirrored_jobs_changes_when_mirror_catches_up() -> None:
    queue = Queue("emails")
    queue.enqueue(1, id="first")
    queue.pause()
    mirror = mirror_of(get_storage())
    mirror.catch_up()
    client, tag = logged_in(make_superuser()), ""

    def look() -> Any:
        nonlocal tag
        read_cache.forget()
        url = address(BY_NAME["jobs"], state="waiting")
        response = client.get(url, headers={"HX-Request": "true", "HX-PTag": tag})
        tag = response.headers.get("HX-PTag", tag)
        return response

    assert b"first" in look().content
    assert reading.parse_tag(tag).version
    assert look().status_code == 304

    queue.enqueue(2, id="second")
    assert b"second" not in look().content  # the tables have it later
    mirror.catch_up()
    assert b"second" in look().content
    assert look().status_code == 304
