"""`manage.py check --tag djqueue`."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.checks import Warning as CheckWarning
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.test import override_settings

from djqueue import checks
from djqueue.client import registry
from djqueue.conf import READERS
from djqueue.core.errors import ConfigurationError
from djqueue.models import OutboxJob
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import requirements

MEMORY = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
DATABASE = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
REDIS = {"BACKEND": "djqueue.storage.redis.RedisStorage"}


class Strict(MemoryStorage):
    """A storage with an option that has to be given."""

    def __init__(self, *, url: str, timeout: float = 5) -> None:
        super().__init__()
        self.url, self.timeout = url, timeout


class Open(MemoryStorage):
    """A storage that takes any option."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def found(settings: Any, given: Any) -> list[CheckMessage]:
    settings.DJQUEUE = given
    return run_checks(tags=["djqueue"], databases=[])


class Half:
    """Middleware that async handlers would go around."""

    def execute(self, job: Any, call_next: Any) -> Any:
        return call_next(job)


def ids(messages: list[CheckMessage]) -> list[str | None]:
    return [message.id for message in messages]


@pytest.fixture(autouse=True)
def _no_job_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job types of other tests are not checked."""
    monkeypatch.setattr(registry, "_types", {})


@pytest.fixture
def databases() -> Iterator[dict[str, dict[str, Any]]]:
    """Databases of a project, which nobody connects to."""
    entries = connections.settings
    there = dict(entries)
    yield entries
    for alias in set(entries) - set(there):
        connections[alias].close()
        del connections[alias]
        del entries[alias]


def add_database(databases: dict[str, dict[str, Any]], **entry: Any) -> str:
    alias = "project"
    databases[alias] = connections.configure_settings({"default": {}, alias: entry})[alias]
    return alias


def of_database(settings: Any, alias: str) -> list[CheckMessage]:
    return found(settings, {"STORAGE": {**DATABASE, "OPTIONS": {"DATABASE": alias}}})


def test_valid_settings_report_nothing(settings: Any) -> None:
    assert found(settings, {"STORAGE": MEMORY, "CONCURRENCY": 3}) == []


def test_each_invalid_key_is_an_error_with_a_hint(settings: Any) -> None:
    messages = found(
        settings, {"STORAGE": MEMORY, "CONCURENCY": 3, "HEARTBEAT": 0, "QUEUES": {"a": {"RATE": "x"}}}
    )
    assert ids(messages) == ["djqueue.E001"] * 3
    assert [message.msg.partition("]")[0] for message in messages] == [
        "DJQUEUE['CONCURENCY'",
        "DJQUEUE['HEARTBEAT'",
        "DJQUEUE['QUEUES'",
    ]
    assert "did you mean 'CONCURRENCY'?" in messages[0].msg
    assert all(message.hint for message in messages)
    assert "CONCURRENCY" in str(messages[0].hint)


def test_every_setting_has_a_hint() -> None:
    assert set(checks.HINTS) == set(READERS)


def test_setting_that_is_not_a_dict_is_one_error(settings: Any) -> None:
    assert ids(found(settings, ["emails"]))[0] == "djqueue.E001"


def test_invalid_setting_stops_a_command_with_its_errors(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": MEMORY, "X": 1}
    with pytest.raises(SystemCheckError, match=r"djqueue\.E001.*DJQUEUE\['X'\] is not a setting"):
        call_command("check", tags=["djqueue"])


@pytest.mark.parametrize("path", ["no.such.Storage", "djqueue.storage.memory.Memory"])
def test_storage_that_cannot_be_imported_is_an_error(settings: Any, path: str) -> None:
    (message,) = found(settings, {"STORAGE": {"BACKEND": path}})
    assert message.id == "djqueue.E002"
    assert path in message.msg


@pytest.mark.parametrize("path", ["djqueue.conf.Settings", "djqueue.conf.READERS"])
def test_backend_that_is_not_a_storage_is_an_error(settings: Any, path: str) -> None:
    (message,) = found(settings, {"STORAGE": {"BACKEND": path}})
    assert message.id == "djqueue.E003"
    assert path in message.msg


def test_unknown_storage_option_is_an_error(settings: Any) -> None:
    (message,) = found(settings, {"STORAGE": {**MEMORY, "OPTIONS": {"URL": "x", "CORES": 2}}})
    assert message.id == "djqueue.E004"
    assert "MemoryStorage has no option 'URL'" in message.msg
    assert "CORES" in str(message.hint)


def test_missing_required_storage_option_is_an_error(settings: Any) -> None:
    backend = f"{__name__}.Strict"
    (message,) = found(settings, {"STORAGE": {"BACKEND": backend, "OPTIONS": {"TIMEOUT": 3}}})
    assert message.id == "djqueue.E004"
    assert "requires the option 'URL'" in message.msg
    assert found(settings, {"STORAGE": {"BACKEND": backend, "OPTIONS": {"URL": "x"}}}) == []


def test_storage_with_arbitrary_options_accepts_any(settings: Any) -> None:
    storage = {"BACKEND": f"{__name__}.Open", "OPTIONS": {"WHATEVER": 1}}
    assert found(settings, {"STORAGE": storage}) == []


def test_codec_outside_the_accepted_content_types_is_an_error(settings: Any) -> None:
    (message,) = found(settings, {"STORAGE": MEMORY, "CODEC": "application/x-yaml"})
    assert message.id == "djqueue.E005"
    assert "application/x-yaml" in message.msg


def test_codec_that_requires_kombu_is_an_error_without_it(settings: Any, monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "kombu", raising=False)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (message,) = found(settings, {"STORAGE": MEMORY, "CODEC": "application/json"})
    assert message.id == "djqueue.E005"
    assert message.hint == "Run `pip install 'djqueue[kombu]'`."


def test_codec_of_kombu_is_valid_after_kombu_was_imported(settings: Any) -> None:
    importlib.import_module("kombu")  # which leaves a module without a spec

    assert found(settings, {"STORAGE": MEMORY, "CODEC": "application/json"}) == []


def test_invalid_content_types_are_one_error(settings: Any) -> None:
    given = {"STORAGE": MEMORY, "ACCEPT_CONTENT": [], "CODEC": "application/x-yaml"}
    assert ids(found(settings, given)) == ["djqueue.E001"]


@pytest.mark.parametrize("name", ["application/x-python-serialize", "pickle"])
def test_accepting_pickle_is_a_warning(settings: Any, name: str) -> None:
    accepted = ["application/x-djqueue-msgpack", name]
    (message,) = found(settings, {"STORAGE": MEMORY, "ACCEPT_CONTENT": accepted})
    assert message.id == "djqueue.W001"
    assert name in message.msg


def test_lease_shorter_than_two_heartbeats_is_a_warning(settings: Any) -> None:
    given = {"STORAGE": MEMORY, "HEARTBEAT": 5, "QUEUES": {"a": {"LEASE": 9}, "b": {"LEASE": 10}}}
    (message,) = found(settings, given)
    assert message.id == "djqueue.W005"
    assert "lease of a (9 s)" in message.msg
    messages = found(settings, {"STORAGE": MEMORY, "HEARTBEAT": 60})
    assert [m.id for m in messages] == ["djqueue.W005"]
    assert "every other queue" in messages[0].msg


# Databases.


def test_sqlite_without_immediate_transactions_is_a_warning_with_a_hint(
    settings: Any, databases: dict[str, Any], tmp_path: Path
) -> None:
    alias = add_database(databases, ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "db")
    (message,) = of_database(settings, alias)
    assert message.id == "djqueue.W002"
    assert "['OPTIONS']['transaction_mode'] = 'IMMEDIATE'" in str(message.hint)


@pytest.mark.parametrize("mode", ["IMMEDIATE", "immediate"])
def test_sqlite_with_immediate_transactions_is_accepted(
    settings: Any, databases: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    alias = add_database(
        databases,
        ENGINE="django.db.backends.sqlite3",
        NAME=tmp_path / "db",
        OPTIONS={"transaction_mode": mode},
    )
    assert of_database(settings, alias) == []


@pytest.mark.parametrize("name", [":memory:", "file:jobs?mode=memory&cache=shared"])
def test_in_memory_database_is_a_warning(settings: Any, databases: dict[str, Any], name: str) -> None:
    alias = add_database(databases, ENGINE="django.db.backends.sqlite3", NAME=name)
    (message,) = of_database(settings, alias)
    assert message.id == "djqueue.W003"
    assert "runworkers" in message.msg


def test_in_memory_test_database_of_django_is_accepted(settings: Any, databases: dict[str, Any]) -> None:
    name = "file:memorydb_default?mode=memory&cache=shared"
    alias = add_database(databases, ENGINE="django.db.backends.sqlite3", NAME=name)
    assert of_database(settings, alias) == []


@pytest.mark.parametrize(("vendor", "expected"), [("mysql", ["djqueue.E004"]), ("postgresql", [])])
def test_database_without_the_needed_locks_is_an_error(
    settings: Any,
    databases: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    expected: list[str],
) -> None:
    # The driver of the one need not be installed: the name of its kind is all that is asked for.
    alias = add_database(databases, ENGINE="django.db.backends.sqlite3", NAME="db")
    monkeypatch.setattr(connections[alias], "vendor", vendor, raising=False)
    messages = of_database(settings, alias)
    assert ids(messages) == expected
    assert all("stores jobs in PostgreSQL or SQLite; use one of these" in one.msg for one in messages)


def test_unconfigured_database_is_an_error(settings: Any) -> None:
    (message,) = of_database(settings, "jobs")
    assert message.id == "djqueue.E004"
    assert "'jobs' is not in DATABASES" in message.msg


def test_database_is_not_checked_for_other_storages(settings: Any, databases: dict[str, Any]) -> None:
    add_database(databases, ENGINE="django.db.backends.sqlite3", NAME=":memory:")
    assert found(settings, {"STORAGE": MEMORY}) == []


# Redis.

NOBODY = "redis://127.0.0.1:1/0"


def of_redis(settings: Any, given: Any = None, **options: Any) -> list[CheckMessage]:
    storage = {**REDIS, "OPTIONS": {"URL": NOBODY, **options}}
    return found(settings, {"STORAGE": storage, **(given or {})})


def test_valid_redis_storage_is_accepted_without_a_connection(settings: Any) -> None:
    assert of_redis(settings, LEASE=60, PREFIX="shop:", TIMEOUT=3) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"URL": None}, "one of CACHE, URL, SENTINELS, CLIENT"),
        ({"UR": "x"}, "'UR' is not an option"),
        ({"URL": "http://h"}, "URL must begin with"),
        ({"LEASE": 0}, "LEASE"),
        ({"TIMEOUT": "5"}, "TIMEOUT"),
        ({"PREFIX": "{x}"}, "PREFIX"),
        ({"MIRROR": {"STATES": ["faild"]}}, "'faild' is not a state"),
    ],
)
def test_invalid_redis_option_is_an_error(settings: Any, options: dict[str, Any], words: str) -> None:
    (message,) = of_redis(settings, **options)
    assert message.id == "djqueue.E004"
    assert message.msg.startswith("DJQUEUE['STORAGE']: OPTIONS: ")
    assert words in message.msg


def test_custom_redis_client_is_not_created_by_checks(settings: Any) -> None:
    assert of_redis(settings, URL=None, CLIENT=pytest.fail) == []


def test_redis_lease_option_applies_to_every_other_queue(settings: Any) -> None:
    (message,) = of_redis(settings, LEASE=9)
    assert message.id == "djqueue.W005"
    assert "every other queue (9 s)" in message.msg


def test_lease_shorter_than_the_call_timeout_is_a_warning(settings: Any) -> None:
    (message,) = of_redis(settings, {"HEARTBEAT": 1, "QUEUES": {"a": {"LEASE": 2}}})
    assert message.id == "djqueue.W006"
    assert "the lease of a (2 s)" in message.msg


@pytest.mark.django_db
@pytest.mark.parametrize(
    "how",
    [
        {"databases": ["default"]},
        {"include_deployment_checks": True},
        {"databases": ["default"], "include_deployment_checks": True},
    ],
    ids=["databases", "deploy", "both"],
)
def test_redis_is_checked_once_with_databases_or_for_deployment(settings: Any, how: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {**REDIS, "OPTIONS": {"URL": NOBODY}}}
    (message,) = run_checks(tags=["djqueue"], **how)
    assert message.id == "djqueue.W007"
    assert isinstance(message, CheckWarning)
    assert "redis 127.0.0.1:1/0" in message.msg


@pytest.mark.django_db
@pytest.mark.parametrize(
    "run",
    [
        {"databases": None},
        {"databases": []},
        {"databases": ["default"]},
        {"databases": ["other"], "tags": ["djqueue"]},
    ],
)
def test_deployment_checks_report_redis_exactly_once(settings: Any, run: dict[str, Any]) -> None:
    settings.DJQUEUE = {"STORAGE": {**REDIS, "OPTIONS": {"URL": NOBODY}}}
    for _ in range(2):
        found = ids(run_checks(**run, include_deployment_checks=True))
        assert found.count("djqueue.W007") == 1


def test_deployment_checks_connect_to_redis_after_a_run_with_databases(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {**REDIS, "OPTIONS": {"URL": NOBODY}}}
    assert "djqueue.W007" in ids(run_checks(tags=["djqueue"], databases=["other"]))
    for databases in ([], ["other"]):
        messages = checks.check_servers_to_deploy(databases=databases)
        assert ids(messages) == ["djqueue.W007"]


def on_the_way(many: int) -> None:
    now = datetime.now(UTC)
    OutboxJob.objects.bulk_create(
        OutboxJob(queue="emails", job_id=f"{at}", name="send", options=b"", payload=b"", created_at=now)
        for at in range(many)
    )


@pytest.mark.django_db
def test_jobs_left_in_an_unused_outbox_are_a_warning(settings: Any) -> None:
    on_the_way(3)
    settings.DJQUEUE = {"STORAGE": MEMORY, "QUEUES": {"emails": {}}}
    (message,) = run_checks(tags=["djqueue"], databases=["default"])
    assert message.id == "djqueue.W012"
    assert isinstance(message, CheckWarning)
    assert "djqueue_outbox_job has 3 jobs" in message.msg
    assert "OUTBOX" in str(message.hint)


@pytest.mark.django_db
@pytest.mark.parametrize(("many", "outbox"), [(0, False), (3, True)], ids=["empty", "relayed"])
def test_empty_or_relayed_outbox_is_accepted(settings: Any, many: int, outbox: bool) -> None:
    on_the_way(many)
    settings.DJQUEUE = {"STORAGE": MEMORY, "QUEUES": {"others": {"OUTBOX": outbox}}}
    assert run_checks(tags=["djqueue"], databases=["default"]) == []


@pytest.mark.django_db
def test_outbox_is_checked_only_in_its_database(settings: Any) -> None:
    on_the_way(3)
    settings.DJQUEUE = {"STORAGE": MEMORY}
    assert run_checks(tags=["djqueue"], databases=["other"]) == []


@pytest.mark.django_db
def test_database_without_the_outbox_table_is_accepted(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJQUEUE = {"STORAGE": MEMORY}
    monkeypatch.setattr(OutboxJob._meta, "db_table", "not_migrated")
    assert run_checks(tags=["djqueue"], databases=["default"]) == []


def test_redis_is_not_contacted_with_invalid_options(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {**REDIS, "OPTIONS": {"UR": NOBODY}}}
    assert ids(run_checks(tags=["djqueue"], databases=[], include_deployment_checks=True)) == ["djqueue.E004"]


def test_failing_redis_client_factory_is_an_error_of_deployment_checks(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {**REDIS, "OPTIONS": {"CLIENT": dict}}}
    (message,) = run_checks(tags=["djqueue"], databases=[], include_deployment_checks=True)
    assert message.id == "djqueue.E004"
    assert "CLIENT must return" in message.msg


def test_missing_package_is_named(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: str) -> None:
        raise ConfigurationError("the Redis storage requires more packages: pip install djqueue[redis]")

    monkeypatch.setattr(checks, "import_string", missing)
    (message,) = of_redis(settings)
    assert message.id == "djqueue.E002"
    assert "pip install djqueue[redis]" in message.msg


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_redis_storage_names_its_extra_if_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)

    with pytest.raises(ConfigurationError, match=r"pip install djqueue\[redis\]"):
        importlib.reload(requirements)


def test_checks_do_not_query_databases_by_default(settings: Any) -> None:
    # pytest-django fails this test, which asks for no database, if one is used.
    assert {*ids(found(settings, {}))} <= {"djqueue.W002"}
    assert call_command("check", tags=["djqueue"], databases=[]) is None


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("djqueue.middleware.Nothing", "cannot be imported"),
        ("tests.test_checks.Half", "has execute but no aexecute"),
        ("tests.test_checks.MEMORY", "is not a class with enqueue or execute"),
        ("djqueue.middleware.LoggingMiddleware", None),
    ],
)
def test_invalid_middleware_entry_is_named(settings: Any, path: str, wrong: str | None) -> None:
    messages = found(settings, {"STORAGE": MEMORY, "MIDDLEWARE": [path]})

    if wrong is None:
        assert messages == []
    else:
        [message] = messages
        assert message.id == "djqueue.E007"
        assert path in message.msg
        assert wrong in message.msg


@pytest.mark.parametrize("given", ["djqueue.middleware.LoggingMiddleware", [print], {}])
def test_middleware_must_be_a_list_of_paths(settings: Any, given: Any) -> None:
    assert ids(found(settings, {"STORAGE": MEMORY, "MIDDLEWARE": given})) == ["djqueue.E001"]


LIMITED = {"charges": {"LIMITER": "stripe"}}


@pytest.mark.parametrize(
    ("given", "id", "words"),
    [
        ({"QUEUES": LIMITED, "LIMITERS": {"strype": {}}}, "djqueue.E008", "'charges'.*'stripe'.*'strype'"),
        ({"QUEUES": LIMITED}, "djqueue.E008", "'stripe'"),
        ({"LIMITERS": {"stripe": {"RATE": "1/s"}}}, "djqueue.W013", "no queue uses 'stripe'"),
        ({"QUEUES": LIMITED, "LIMITERS": {"stripe": {"RATE": 1}}}, "djqueue.E001", "RATE"),
        ({"QUEUES": LIMITED, "LIMITERS": {"stripe": {"CONCURRENCI": 1}}}, "djqueue.E001", "'CONCURRENCY'"),
        ({"QUEUES": {"charges": {"LIMITER": 1}}, "LIMITERS": {}}, "djqueue.E001", "LIMITER"),
        ({"LIMITERS": ["stripe"]}, "djqueue.E001", "dict of limiters"),
    ],
)
def test_limiters_that_do_not_match_queues_are_named(settings: Any, given: Any, id: str, words: str) -> None:
    [message] = found(settings, {"STORAGE": MEMORY, **given})

    assert message.id == id
    assert re.search(words, message.msg)


def test_limiters_used_by_queues_are_accepted(settings: Any) -> None:
    assert found(settings, {"STORAGE": MEMORY, "QUEUES": LIMITED, "LIMITERS": {"stripe": {}}}) == []


@pytest.mark.parametrize("given", ["tasks", None, [1], ["no-module"], [""], ["shop."], {"tasks": 1}])
def test_modules_must_be_names_of_modules(settings, given):
    assert ids(found(settings, {"STORAGE": MEMORY, "MODULES": given})) == ["djqueue.E001"]


def test_module_found_in_no_app_is_a_warning(settings):
    [message] = found(settings, {"STORAGE": MEMORY, "MODULES": ["taks"]})

    assert message.id == "djqueue.W015"
    assert message.msg == "DJQUEUE['MODULES']: no installed app has a module 'taks', so it adds no jobs."
    assert "Did you mean" not in message.hint


def test_similar_module_of_an_app_is_suggested(settings):
    apps = [*settings.INSTALLED_APPS, "tests.client.depot"]
    with override_settings(INSTALLED_APPS=apps, DJQUEUE={"STORAGE": MEMORY, "MODULES": ["taks"]}):
        [message] = run_checks(tags=["djqueue"], databases=[])

    assert "Did you mean 'tasks' (in tests.client.depot)?" in message.hint


def test_module_of_an_installed_app_is_accepted(settings):
    apps = [*settings.INSTALLED_APPS, "tests.client.depot"]
    with override_settings(INSTALLED_APPS=apps, DJQUEUE={"STORAGE": MEMORY, "MODULES": ["tasks"]}):
        assert run_checks(tags=["djqueue"], databases=[]) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queues": {}}, "'queues' is not a setting; did you mean 'QUEUES'"),
        ({"QUEUES": {"emails": {"rate": "1/s"}}}, "did you mean 'RATE'"),
        ({"STORAGE": {"backend": "x.y"}}, "did you mean 'BACKEND'"),
        ({"DEFAULTS": {"MAX_ATTEMPTS": 3}}, "did you mean 'max_attempts'"),
    ],
)
def test_key_in_the_wrong_case_suggests_the_right_one(settings, given, words):
    [message] = found(settings, given if "STORAGE" in given else {"STORAGE": MEMORY, **given})

    assert message.id == "djqueue.E001"
    assert words in message.msg.replace("]", "")


DATABASE_STORAGE = "djqueue.storage.database.DatabaseStorage"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"NOTIFY": "no"}, "NOTIFY: expected True or False, got 'no'"),
        ({"TIMEOUT": 0}, "TIMEOUT: expected a number of seconds above 0, 3600 at most, got 0"),
        ({"TIMEOUT": "2s"}, "TIMEOUT: expected a number of seconds above 0, 3600 at most, got '2s'"),
        ({"DATABSE": "default"}, "has no option 'DATABSE'; did you mean 'DATABASE'?"),
        ({"POLICIES": {}}, "has no option 'POLICIES'"),
        ({"CLOCK": 1}, "has no option 'CLOCK'"),
    ],
    ids=str,
)
def test_invalid_options_of_the_database_storage_are_errors(settings, options, words):
    given = {"STORAGE": {"BACKEND": DATABASE_STORAGE, "OPTIONS": options}}
    errors = [message for message in found(settings, given) if message.id == "djqueue.E004"]

    assert len(errors) == 1
    assert words in errors[0].msg
    assert "secret" not in errors[0].msg


@pytest.mark.parametrize("path", ["shop.nope", "tests.test_checks.nope"])
def test_queue_filter_that_cannot_be_imported_is_a_warning(settings, path):
    [message] = found(settings, {"STORAGE": MEMORY, "DASHBOARD": {"QUEUE_FILTER": path}})

    assert message.id == "djqueue.W016"
    assert f"DJQUEUE['DASHBOARD']: QUEUE_FILTER: {path!r} cannot be imported" in message.msg
    path = "tests.test_checks.found"
    assert found(settings, {"STORAGE": MEMORY, "DASHBOARD": {"QUEUE_FILTER": path}}) == []


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        (True, 4),
        ({"min_size": 2}, 2),
        ({"min_size": 2, "max_size": 14}, 14),
        ({"max_size": 15}, None),
        (None, None),
    ],
)
def test_pool_with_fewer_connections_than_a_worker_needs_is_reported(
    settings: Any, monkeypatch: pytest.MonkeyPatch, pool: Any, size: int | None
) -> None:
    settings.DJQUEUE = {"CONCURRENCY": 10}
    database = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"pool": pool}}
    with monkeypatch.context() as patched:
        patched.setitem(settings.DATABASES, "pooled", database)
        found = [one for one in checks.check_jobs_to_deploy() if one.id == "djqueue.W021"]

    assert len(found) == (size is not None)
    for message in found:
        assert f"DATABASES['pooled']['OPTIONS']['pool'] has {size} connections" in message.msg
        assert "may need 15" in message.msg
        assert "'max_size': 15" in message.hint
