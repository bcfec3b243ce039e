"""Databases of the former storage."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection

from .former import make_former, using

MakeFormer = Callable[..., dict[str, Any]]


@pytest.fixture
def former(tmp_path: Path, request: pytest.FixtureRequest, django_db_blocker: Any) -> Iterator[MakeFormer]:
    """Makes tables and jobs of the former storage in a database of the test's own; returns its settings."""
    if connection.vendor == "postgresql":
        url = urlsplit(request.getfixturevalue("postgres_server").create_database())
        settings = {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": url.hostname,
            "PORT": url.port,
            "USER": url.username,
            "NAME": url.path.removeprefix("/"),
        }
    else:
        settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "former.sqlite3")}

    def make(times: int = 1) -> dict[str, Any]:
        make_former(times)
        return settings

    with django_db_blocker.unblock(), using(settings):
        yield make
