"""Database aliases for URLs, with and without a project."""

import os
import subprocess
import sys
from contextlib import closing

import pytest
from django.db import connections

from djqueue.contrib.spark.aliases import alias_of, location_of, parse
from djqueue.contrib.spark.locations import storage_at
from djqueue.core.errors import OptionError, StorageUnavailableError

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("url", "expected", "place"),
    [
        (
            "postgresql://ann:p%40ss%2Fw@db.example:5433/shop",
            {"HOST": "db.example", "PORT": "5433", "NAME": "shop", "USER": "ann", "PASSWORD": "p@ss/w"},
            "postgresql://db.example:5433/shop",
        ),
        (
            "postgres://ann@[::1]/shop%20one?sslmode=require&connect_timeout=3",
            {
                "HOST": "::1",
                "NAME": "shop one",
                "PASSWORD": "",
                "OPTIONS": {"sslmode": "require", "connect_timeout": "3"},
            },
            "postgresql://[::1]/shop one",
        ),
        (
            "postgresql:///shop?host=/var/run/postgresql&user=ann",
            {"HOST": "/var/run/postgresql", "PORT": "", "USER": "ann", "OPTIONS": {"connect_timeout": 10}},
            "postgresql:///var/run/postgresql/shop",
        ),
    ],
)
def test_database_url_is_parsed_into_settings_of_django(url, expected, place):
    said = parse(url)

    assert said == {**said, **expected}
    assert location_of(said) == place


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_sqlite_url_contains_the_absolute_path_of_its_file(tmp_path, slashes):
    path = tmp_path / "a b?.db"
    path.touch()

    said = parse(f"sqlite://{slashes}{str(path)[1:].replace('?', '%3F')}?timeout=7")

    assert said["NAME"] == str(path)
    assert said["OPTIONS"] == {"timeout": 7, "transaction_mode": "IMMEDIATE"}
    assert location_of(said) == f"sqlite://{path}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://u:hunter2/x@db.example/shop", "percent-encode special characters"),
        ("postgresql://u:hunter2#@db.example/shop", "percent-encode # as %23|the port is not a number"),
        ("postgresql://u:hunter2@db.example", "the database name is missing"),
        ("postgresql://u@db.example/shop?password=hunter2", "put the password before the host"),
        ("mysql://u:hunter2@db.example/shop", "mysql:// is not supported"),
        ("oracle://u:hunter2@db.example/shop", "oracle:// is not one of redis://, .*, sqlite://"),
        ("u:hunter2@db.example/shop", "url: must start with one of redis://, .*, sqlite://"),
        ("u:hunter2@mysql.example", "url: must start with one of redis://"),
        ("://u:hunter2@db.example/shop", "url: must start with one of redis://"),
        ("sqlite:///srv/nowhere/hunter.db", "the file /srv/nowhere/hunter.db does not exist"),
        ("sqlite://db.sqlite3", "an absolute path"),
        (f"sqlite://{__file__}?timeout=never", "url: timeout: 'never' is not a number"),
        ("sqlite:///:memory:", "an absolute path"),
        (f"sqlite://{__file__}?mode=ro", "only the parameter timeout; got 'mode'"),
    ],
)
def test_error_for_an_invalid_url_does_not_contain_its_password(url, message):
    with pytest.raises(OptionError, match=message) as raised:
        storage_at(url)

    assert str(raised.value).startswith("url: ")
    assert "hunter2" not in str(raised.value)


def test_key_prefix_is_rejected_for_a_database(sqlite_url):
    with pytest.raises(OptionError, match="keyPrefix: only Redis has a key prefix"):
        storage_at(sqlite_url, "shop:")


@pytest.mark.dialect
def test_url_of_the_projects_database_uses_its_alias(db):
    said = connections["default"].settings_dict
    if connections["default"].vendor == "sqlite":
        url = f"sqlite://{said['NAME']}"
    else:
        url = f"postgresql://{said['USER']}:{said['PASSWORD']}@{said['HOST']}:{said['PORT']}/{said['NAME']}"

    assert alias_of(url) == "default"
    with closing(storage_at(url)) as storage:
        storage.connect()
        assert storage.queues.names() == []
    assert connections["default"].connection is not None, "the project's connection is its own"


def test_other_databases_get_separate_aliases(sqlite_url):
    first = "postgresql://ann:hunter2@127.0.0.1:1/shop"
    second = "postgresql://ann:hunter3@127.0.0.1:1/shop"
    place = "postgresql://127.0.0.1:1/shop"

    found = [alias_of(url) for url in (first, sqlite_url, second, first)]

    assert found == [place, sqlite_url, f"{place} (2)", place]
    assert [connections[alias].settings_dict["PASSWORD"] for alias in found] == [
        "hunter2",
        "",
        "hunter3",
        "hunter2",
    ]


def test_error_for_an_unreachable_database_does_not_contain_its_password(sqlite_url):
    with closing(storage_at("postgresql://ann:hunter2@127.0.0.1:1/shop")) as storage:
        with pytest.raises(
            StorageUnavailableError, match=r"postgresql://127\.0\.0\.1:1/shop' cannot be used"
        ) as raised:
            storage.connect()
        with pytest.raises(StorageUnavailableError) as asked:
            storage.queues.names()

        said = f"{raised.value} {asked.value} {storage.describe()} {storage!r}"
    assert "hunter2" not in said
    assert "ann" not in storage.describe()


def test_closed_storage_has_no_open_connection(sqlite_url):
    with closing(storage_at(sqlite_url)) as storage:
        storage.connect()
        assert storage.queues.names() == []
    assert connections[alias_of(sqlite_url)].connection is None


# In separate processes.

WITHOUT_A_PROJECT = """
import sys, time
from contextlib import closing
from djqueue.contrib.spark.locations import storage_at
from djqueue.testing.factories import batch
before = time.tzname
for at, url in enumerate(sys.argv[1:]):
    with closing(storage_at(url)) as storage:
        storage.connect()
        storage.enqueue([batch(at + 1)])
for url in sys.argv[1:]:
    with closing(storage_at(url)) as storage:
        print(len(storage.reads.page("default", None, 10)), end=" ")
from django.conf import settings
print(settings.USE_TZ, settings.TIME_ZONE, time.tzname == before)
"""


def run(program, *arguments, **environment):
    ours = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env={**ours, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("environment", [{}, {"DJANGO_SETTINGS_MODULE": "shop.settings"}], ids=str)
def test_django_is_set_up_for_a_process_without_a_project(sqlite_url, postgresql_url, environment):
    said = run(WITHOUT_A_PROJECT, sqlite_url, postgresql_url, TZ="Asia/Kathmandu", **environment)

    assert said == "1 2 True UTC True"


def test_error_names_missing_psycopg():
    program = """
import sys
sys.modules["psycopg"] = sys.modules["psycopg2"] = None
from djqueue.contrib.spark.locations import storage_at
try:
    storage_at("postgresql://ann:hunter2@db.example/shop")
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run(program)

    assert said.startswith("OptionError url: postgresql://db.example/shop needs psycopg: pip install")
    assert "hunter2" not in said


def test_project_that_does_not_install_djqueue_is_rejected(tmp_path):
    (tmp_path / "shop_settings.py").write_text("INSTALLED_APPS = []\nSECRET_KEY = 'x'\n")
    program = """
from djqueue.contrib.spark.locations import storage_at
try:
    storage_at("postgresql://ann@db.example/shop")
except Exception as error:
    print(type(error).__name__, error)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])

    said = run(program, PYTHONPATH=path, DJANGO_SETTINGS_MODULE="shop_settings")

    assert said == (
        "OptionError url: the Django settings of this process do not have djqueue in INSTALLED_APPS"
    )
