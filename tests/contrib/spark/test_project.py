"""Defaults of a write inside a Django project."""

import pytest
from psycopg import IsolationLevel

from djqueue import job
from djqueue.client.registered import registry
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


def test_the_storage_is_the_project_s():
    found = read()

    assert (found.url, found.prefix) == (URL, "shop:")


def test_another_url_is_another_storage():
    found = read(url="redis://other/0")

    assert (found.url, found.prefix) == ("redis://other/0", "")


def test_a_queue_is_used_as_it_is_configured(project):
    project(QUEUES={"emails": {"MAX_SIZE": 5_000, "GROUP_MODE": "keyed"}}, MAX_PAYLOAD=1_000)

    found = read()
    other = read(queue="other", max_queue_depth="9")

    assert (found.max_queue_depth, found.group_mode, found.max_payload) == (5_000, "keyed", 1_000)
    assert (other.max_queue_depth, other.group_mode) == (9, None)


def test_a_registered_job_has_its_options(send):
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


def test_a_tag_of_a_registered_job_may_have_a_comma(send):
    send(tags=["a,b", "c"])

    assert JobColumns(read(), ["n"]).base.job.tags == ("a,b", "c")


def test_what_is_said_counts_more_than_the_job(send):
    send(max_attempts=7, priority=3, delay=5)

    found = read(max_attempts="2", priorityColumn="p", runAtColumn="at")

    assert found.constants == {"max_attempts": 2}
    assert found.columns == {"priority": "p", "run_at": "at"}


def test_a_backoff_that_is_a_function_is_left_to_the_workers(send):
    send(backoff=lambda failures, error: 1.0)

    assert read().constants == {}


def test_defaults_of_the_settings_count_for_jobs_that_are_not_registered(project):
    project(DEFAULTS={"max_attempts": 9})

    assert read().constants == {"max_attempts": 9}


def test_operations_take_the_storage_alone(send):
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
def test_what_a_url_does_not_say_is_not_guessed(project, options):
    project(STORAGE={"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options})

    assert "url" not in with_defaults(GIVEN)


def test_a_database_has_a_url_too(project, settings, monkeypatch):
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


def test_a_database_url_has_no_options_of_django_itself(project, settings, monkeypatch):
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
def test_a_database_that_other_processes_cannot_find_by_a_url_has_none(project, settings, monkeypatch, more):
    project(STORAGE={"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {"DATABASE": "jobs"}})
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", **more}
    monkeypatch.setitem(settings.DATABASES, "jobs", database)

    assert "url" not in with_defaults(GIVEN)


@pytest.mark.parametrize("module", [None, "no_such_project.settings"])
def test_without_a_project_nothing_changes(monkeypatch, module):
    if module is None:
        monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    else:
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", module)

    assert with_defaults(GIVEN) == GIVEN


def test_a_project_without_djqueue_says_nothing(settings):
    del settings.DJQUEUE

    assert with_defaults(GIVEN) == GIVEN
