"""Defaults of a write inside a Django project."""

import pytest
from psycopg import IsolationLevel

from djqueue import job
from djqueue.client import registry
from djqueue.contrib.spark.aliases import parse
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.project import with_defaults
from djqueue.contrib.spark.rows import JobColumns
from djqueue.core.backoff import Backoff

URL = "redis://:hunter2@redis.example:6379/0"
GIVEN = {"queue": "emails", "job": "shop.send"}


@pytest.fixture(autouse=True)
def project(settings, monkeypatch):
    def say(**more):
        storage = {
            "BACKEND": "djqueue.storage.redis.RedisStorage",
            "OPTIONS": {"URL": URL, "PREFIX": "shop:"},
        }
        settings.DJQUEUE = {"STORAGE": storage, **more}

    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    say()
    return say


@pytest.fixture
def send():
    """Register a job for a test."""
    names = []

    def register(**options):
        @job(name="shop.send", **options)
        def sends():
            """Do nothing."""

        names.append("shop.send")

    yield register
    for name in names:
        registry._types.pop(name, None)


def read(**given):
    return WriteOptions.read(with_defaults({**GIVEN, **given}))


def test_write_uses_the_storage_of_the_project():
    found = read()

    assert (found.url, found.prefix) == (URL, "shop:")


def test_url_option_overrides_the_storage_of_the_project():
    found = read(url="redis://other/0")

    assert (found.url, found.prefix) == ("redis://other/0", "")


def test_write_uses_the_configured_limits_of_its_queue(project):
    project(QUEUES={"emails": {"MAX_SIZE": 5_000, "KEY_MODE": "keyed"}}, MAX_PAYLOAD=1_000)

    found = read()
    other = read(queue="other", max_queue_depth="9")

    assert (found.max_queue_depth, found.key_mode, found.max_payload) == (5_000, "keyed", 1_000)
    assert (other.max_queue_depth, other.key_mode) == (9, None)


def test_write_uses_the_options_of_a_registered_job(send):
    send(
        max_attempts=7,
        timeout=30,
        priority=3,
        tags=["a", "b"],
        lifo=True,
        headers={"tenant": 7},
        backoff={"kind": "linear", "base": 2},
        delay=5,
    )

    jobs = JobColumns(read(), ["n"]).base

    options = jobs.job
    assert (options.max_attempts, options.timeout, options.priority) == (7, 30_000, 3)
    assert (options.tags, options.lifo, jobs.delay) == (("a", "b"), True, 5_000)
    assert options.headers == {"tenant": 7}
    assert options.backoff == Backoff(kind="linear", base=2_000)


def test_tag_of_a_registered_job_can_contain_a_comma(send):
    send(tags=["a,b", "c"])

    assert JobColumns(read(), ["n"]).base.job.tags == ("a,b", "c")


def test_options_of_the_write_override_those_of_the_registered_job(send):
    send(max_attempts=7, priority=3, delay=5)

    found = read(max_attempts="2", priorityColumn="p", runAtColumn="at")

    assert found.constants == {"max_attempts": 2}
    assert found.columns == {"priority": "p", "run_at": "at"}


def test_backoff_function_is_left_to_the_workers(send):
    send(backoff=lambda failures, error: 1.0)

    assert read().constants == {}


def test_defaults_of_the_settings_apply_to_unregistered_jobs(project):
    project(DEFAULTS={"max_attempts": 9})

    assert read().constants == {"max_attempts": 9}


def test_operations_use_only_the_storage_of_the_project(send):
    send(priority=3)

    found = with_defaults({"operation": "retry", "queue": "emails"})

    assert found == {"operation": "retry", "queue": "emails", "url": URL, "keyPrefix": "shop:"}


@pytest.mark.parametrize(
    "options",
    [
        {"URL": URL, "CONNECTION": {"ssl_ca_certs": "/etc/ca.pem"}},
        {"URL": "redis+sentinel://h:1/djqueue/0", "SENTINEL_KWARGS": {"password": "hunter2"}},
    ],
)
def test_storage_options_without_a_url_equivalent_give_no_default_url(project, options):
    project(STORAGE={"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options})

    assert "url" not in with_defaults(GIVEN)


def test_database_storage_gives_a_default_url(project, settings, monkeypatch):
    project(STORAGE={"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {"DATABASE": "jobs"}})
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "shop",
        "USER": "me",
        "PASSWORD": "p@ss/word",
        "HOST": "db.example",
        "PORT": 5433,
        "OPTIONS": {"sslmode": "require"},
    }
    monkeypatch.setitem(settings.DATABASES, "jobs", database)

    url = with_defaults(GIVEN)["url"]

    assert url == "postgresql://me:p%40ss%2Fword@db.example:5433/shop?sslmode=require"


def test_database_url_omits_options_that_only_django_uses(project, settings, monkeypatch):
    project(STORAGE={"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {"DATABASE": "jobs"}})
    options = {
        "pool": True,
        "isolation_level": IsolationLevel.SERIALIZABLE,
        "server_side_binding": True,
        "assume_role": "jobs",
        "keepalives": True,
    }
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "OPTIONS": options}
    monkeypatch.setitem(settings.DATABASES, "jobs", database)

    url = with_defaults(GIVEN)["url"]

    assert parse(url)["OPTIONS"] == {"connect_timeout": 10, "assume_role": "jobs", "keepalives": "1"}


@pytest.mark.parametrize(
    "more", [{"NAME": "", "OPTIONS": {"service": "shop"}}, {"OPTIONS": {"password": "hunter2"}}]
)
def test_database_that_a_url_cannot_describe_gives_no_default_url(project, settings, monkeypatch, more):
    project(STORAGE={"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {"DATABASE": "jobs"}})
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", **more}
    monkeypatch.setitem(settings.DATABASES, "jobs", database)

    assert "url" not in with_defaults(GIVEN)


@pytest.mark.parametrize("module", [None, "no_such_project.settings"])
def test_options_stay_unchanged_without_a_project(monkeypatch, module):
    if module is None:
        monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    else:
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", module)

    assert with_defaults(GIVEN) == GIVEN


def test_options_stay_unchanged_without_djqueue_settings(settings):
    del settings.DJQUEUE

    assert with_defaults(GIVEN) == GIVEN
