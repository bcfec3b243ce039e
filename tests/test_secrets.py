"""Passwords in the settings appear in no representation, message, log line, check or page."""

import io
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.urls import reverse
from redis.sentinel import Sentinel

from djqueue import conf
from djqueue.client.storages import close_storage, get_storage, make_storage
from djqueue.core.errors import ConfigurationError, DjqueueError, StorageError
from djqueue.core.messages import HiddenOptions, kind_of, shown_name, without_credentials
from djqueue.dashboard.urls import PAGES
from djqueue.runtime import Worker
from djqueue.storage.redis import RedisStorage
from tests import servers

pytestmark = pytest.mark.django_db
PASSWORD = "hunter2-Xq9"
USER_PASSWORD = "letmein-Zw4"
REDIS = "djqueue.storage.redis.RedisStorage"
URL = f"redis://:{PASSWORD}@127.0.0.1:1/0"


def client() -> redis.Redis:
    return redis.Redis(port=1, password=PASSWORD)


def redis_with(**options: Any) -> dict[str, Any]:
    return {"STORAGE": {"BACKEND": REDIS, "OPTIONS": options}}


RIGHT = [
    redis_with(URL=URL),
    redis_with(URL=f"rediss://me:{PASSWORD}@localhost:1/0"),
    redis_with(URL=f"redis://localhost:1/0?password={PASSWORD}"),
    redis_with(URL=f"redis+sentinel://:{PASSWORD}@127.0.0.1:1/main", SENTINEL_KWARGS={"password": PASSWORD}),
    redis_with(URL=f"redis+cluster://:{PASSWORD}@127.0.0.1:1"),
    redis_with(URL="redis://127.0.0.1:1", CONNECTION={"password": PASSWORD}),
    redis_with(SENTINELS=[("127.0.0.1", 1)], MASTER_NAME="main", PASSWORD=PASSWORD),
    redis_with(CLIENT=client),
    redis_with(CLIENT="tests.test_secrets.client"),
    redis_with(CLIENT=lambda: Sentinel([("127.0.0.1", 1)], password=PASSWORD).master_for("main")),
    redis_with(CACHE="secret"),
    redis_with(CACHE="django"),
]
"""Settings that can be used: of servers that are not there."""

WRONG = [
    URL,
    [URL],
    {URL: 1},
    {"STORAGE": URL},
    {"STORAGE": [URL]},
    {"STORAGE": {URL: 1}},
    {"STORAGE": {"BACKEND": URL}},
    {"STORAGE": {"BACKEND": REDIS, "OPTIONS": URL}},
    {"STORAGE": {"BACKEND": REDIS, "OPTIONS": [("URL", URL)]}},
    {"STORAGE": {"OPTIONS": {"DATABASE": URL}}},
    {"STORAGE": {"OPTIONS": {"ADDRESS": URL}}},
    {"STORAGE": {"OPTIONS": {"SQL": URL}}},
    {"STORAGE": {"OPTIONS": {URL: 1}}},
    {"QUEUES": URL},
    {"QUEUES": {"a": URL}},
    {"QUEUES": {"a": {"LEASE": URL}}},
    {"VERSION": 5, "CODEC": [URL]},
    {"MIDDLEWARE": URL},
    {"HEARTBEAT": URL},
    {"MAX_PAYLOAD": URL},
    {"DASHBOARD": URL},
    redis_with(URL=[URL]),
    redis_with(URL=URL.removeprefix("redis://")),
    redis_with(URL=URL.replace("redis:", "https:")),
    redis_with(URL=f"redis://:12/{PASSWORD}@127.0.0.1:1/0"),
    redis_with(URL=f"redis://:12?{PASSWORD}@127.0.0.1:1/0"),
    redis_with(URL=f"redis://:12#{PASSWORD}@127.0.0.1:1/0"),
    redis_with(URL=f"redis://:{PASSWORD}[@127.0.0.1:1/0"),
    redis_with(URL=f"redis://:{PASSWORD}@127.0.0.1:port/0"),
    redis_with(URL=f"redis://127.0.0.1/{PASSWORD}"),
    redis_with(URL=f"redis+sentinel://:12/{PASSWORD}@127.0.0.1:1/main"),
    redis_with(URL=f"redis+sentinel://:{PASSWORD}@127.0.0.1:1"),
    redis_with(URL=f"redis+cluster://:{PASSWORD}@127.0.0.1:1/x"),
    redis_with(URL="redis://127.0.0.1:1", CONNECTION=f"password={PASSWORD}"),
    redis_with(URL="redis://127.0.0.1:1", CONNECTION=URL),
    redis_with(URL="redis://127.0.0.1:1", CONNECTION=[("password", PASSWORD)]),
    redis_with(URL="redis://127.0.0.1:1", CONNECTION={URL: 1}),
    redis_with(URL=URL, PASSWORD=PASSWORD),
    redis_with(URL=URL, CLIENT=client),
    redis_with(CLIENT=URL),
    redis_with(CLIENT=[URL]),
    redis_with(CLIENT=lambda: URL),
    redis_with(CACHE=URL),
    redis_with(CACHE=[URL]),
    redis_with(CACHE="wrong"),
    redis_with(SENTINELS=URL, MASTER_NAME="main"),
    redis_with(SENTINELS=[URL], MASTER_NAME="main"),
    redis_with(SENTINELS=[(URL, 1)], MASTER_NAME="main"),
    redis_with(SENTINELS=[("h", 1)], MASTER_NAME="main", SENTINEL_KWARGS=f"password={PASSWORD}"),
    redis_with(SENTINELS=[("h", 1)], PASSWORD=PASSWORD),
    redis_with(URL=URL, TIMEOUT=URL),
    redis_with(URL=URL, LEASE=URL),
    redis_with(URL=URL, PREFIX=[URL]),
    redis_with(URL=URL, STREAM=URL),
    redis_with(URL=URL, MIRROR=URL),
    redis_with(URL=URL, MIRROR={URL: 1}),
    redis_with(URL=URL, MIRROR={"STATES": [URL]}),
    redis_with(URL=URL, PASWORD=PASSWORD),
]
"""Settings that are refused."""


@pytest.fixture(autouse=True)
def _caches(settings: Any) -> None:
    django, other = "django.core.cache.backends.redis.RedisCache", "django_redis.cache.RedisCache"
    settings.CACHES = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "secret": {"BACKEND": other, "LOCATION": URL, "OPTIONS": {"PASSWORD": PASSWORD}},
        "django": {"BACKEND": django, "LOCATION": URL},
        "wrong": {"BACKEND": django, "LOCATION": f"redis://:12/{PASSWORD}@h"},
    }


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Everything that djqueue and redis-py log, with tracebacks."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in ("djqueue", "redis", "push_response")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield text
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def shown(thing: object) -> str:
    """Return all that a thing shows of itself, with that of what it is made of."""
    parts = [repr(thing), str(thing)]
    for owner in (thing, *vars(thing).values()) if hasattr(thing, "__dict__") else (thing,):
        parts += [repr(owner), str(owner)]
    return "\n".join(parts)


def said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def id_of(given: object) -> str:
    return repr(given).replace(PASSWORD, "…")[:90]


@pytest.mark.parametrize("given", RIGHT, ids=id_of)
def test_configured_storage_never_shows_its_password(
    given: dict[str, Any], settings: Any, logged: io.StringIO
) -> None:
    options = {"TIMEOUT": 0.5, **given["STORAGE"]["OPTIONS"]}
    settings.DJQUEUE = redis_with(**options)
    found = conf.get_settings()
    text = [shown(found), f"{found.storage_options}", repr(vars(found)), str(run_checks())]
    text.append(str(run_checks(include_deployment_checks=True)))
    try:
        storage = make_storage(found)
    except DjqueueError as error:
        text.append(said(error))
    else:
        assert isinstance(storage, RedisStorage)
        text += [storage.describe(), repr(storage), repr(storage.options), repr(vars(storage._connections))]
        with pytest.raises(StorageError) as caught:
            storage.connect()
        text.append(said(caught.value))
        storage.close()

    assert_hidden(text, logged)


@pytest.mark.parametrize("given", WRONG, ids=id_of)
def test_errors_of_invalid_settings_never_show_the_password(
    given: Any, settings: Any, logged: io.StringIO
) -> None:
    settings.DJQUEUE = given
    text = [str(run_checks()), str(conf.problems(given))]
    with pytest.raises((DjqueueError, ValueError, TypeError)) as caught:
        make_storage(conf.read_settings(given))
    text.append(said(caught.value))
    try:
        call_command("runworkers", until_empty=True, stdout=io.StringIO(), stderr=io.StringIO())
    except (Exception, SystemExit) as error:
        text += [str(error), repr(error), said(error) if not isinstance(error, SystemCheckError) else ""]

    assert_hidden(text, logged)


def assert_hidden(text: list[str], logged: io.StringIO) -> None:
    everything = "\n".join([*text, logged.getvalue()])
    # A traceback quotes the lines of code, and this file's have no password by itself.
    for word in (PASSWORD, USER_PASSWORD):
        assert word not in everything, everything[max(0, everything.find(word) - 300) :][:600]


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[servers.RedisServer]:
    """A server that wants a password."""
    with servers.RedisServer() as server:
        server.run("ACL", "SETUSER", "worker", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        yield server


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("password", [PASSWORD, USER_PASSWORD], ids=["right", "wrong"])
def test_worker_and_dashboard_never_show_the_password(
    guarded_server: servers.RedisServer,
    password: str,
    settings: Any,
    logged: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    admin_client: Any,
) -> None:
    settings.DJQUEUE = redis_with(
        URL=f"redis://worker:{password}@127.0.0.1:{guarded_server.port}/0", TIMEOUT=1
    )
    out, text = io.StringIO(), []
    try:
        storage = get_storage()
        try:
            call_command("runworkers", until_empty=True, stdout=out, stderr=out)
        except (Exception, SystemExit) as error:
            text.append(said(error))
        try:
            text.append(repr(storage.reads.diagnostics()))
            worker = Worker(storage, handlers={"x": lambda job: None}, until_empty=True)
            text += [repr(worker), repr(worker.options)]
        except StorageError as error:
            text.append(said(error))
        text.append(str(run_checks(include_deployment_checks=True)))
        for page in PAGES:
            if page.method == "GET" and "<" not in page.route and page.name != "stream":
                address = reverse(f"admin:djqueue_dashboard_{page.name}")
                text.append(b"".join(admin_client.get(address)).decode())
    finally:
        close_storage()

    printed = capsys.readouterr()
    assert_hidden([*text, out.getvalue(), printed.out, printed.err], logged)


def test_hidden_options_show_only_names() -> None:
    options = HiddenOptions({"url": URL, URL: 5})

    assert repr(options) == str(options) == f"{options}" == "{'url': …, a str: …}"
    assert options["url"] == URL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"cannot reach {URL} now", "cannot reach redis://…@127.0.0.1:1/0 now"),
        ("redis://:a@b/c@host", "redis://…@host"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("write to me@example.org", "write to me@example.org"),
    ],
)
def test_credentials_are_removed_from_texts(text: str, expected: str) -> None:
    assert without_credentials(text) == expected
    assert str(ConfigurationError(text)) == expected


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        ("some.path", "'some.path'", "a str"),
        (URL, "a str", "a str"),
        (5, "5", "an int"),
        ([URL], "a list", "a list"),
    ],
)
def test_names_and_numbers_are_shown_but_urls_are_hidden(value: object, name: str, kind: str) -> None:
    assert shown_name(value) == name
    assert kind_of(value) == kind
