"""`manage.py djqueue`: output and errors."""

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from djqueue import models
from djqueue.client import get_storage
from djqueue.client.storages import close_storage
from djqueue.management.commands import djqueue
from djqueue.testing import factories as f

from .looking import assert_alike, copy_all


@pytest.fixture
def configured(settings, redis_url):
    """The same Redis, as the settings name it."""
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {"URL": redis_url}}
    }
    yield get_storage()
    close_storage()


def run(*arguments: str) -> str:
    output = StringIO()
    call_command(djqueue.Command(), *arguments, stdout=output)
    return output.getvalue()


def help_of(action: str, capsys) -> str:
    with pytest.raises(SystemExit):
        run(action, "--help")
    return capsys.readouterr().out


def test_resync_copies_everything_and_counts_it(configured, mirror):
    f.enqueue_many(configured, 3)
    f.enqueue_many(configured, 2, queue="other")
    copy_all(mirror)
    models.Job.objects.all().delete()

    output = run("resync")

    assert "default: 3 jobs copied, 0 unfinished jobs no longer in Redis removed" in output
    assert "other: 2 jobs copied" in output
    assert_alike(configured)


def test_a_dry_run_of_resync_counts_and_changes_nothing(configured, mirror, redis_server):
    f.enqueue_many(configured, 3)
    f.a_completed_job(configured, queue="lost")
    f.enqueue_many(configured, 2, queue="lost")
    copy_all(mirror)
    models.Job.objects.filter(queue="default").delete()
    redis_server.run("DEL", configured.keys("lost").key("jobs"))

    output = run("resync", "--dry-run")
    counted = json.loads(run("resync", "--dry-run", "--json"))

    assert "default: 3 jobs would be copied" in output
    assert "lost: 0 jobs would be copied, 2 unfinished jobs no longer in Redis would be removed" in output
    assert models.Job.objects.count() == 3
    assert json.loads(run("resync", "--json")) == counted
    assert [row.queue for row in models.Job.objects.order_by("queue")] == ["default"] * 3 + ["lost"]


def test_resync_of_one_queue_reports_only_that_queue(configured, tables):
    f.enqueue(configured)
    f.enqueue(configured, queue="other")

    assert "default" not in run("resync", "--queue", "other")


def test_counts_of_resync_and_restore_can_be_json(configured, tables):
    f.enqueue_many(configured, 3)

    resynced = json.loads(run("resync", "--json"))
    restored = json.loads(run("restore-from-mirror", "--dry-run", "--json"))

    assert resynced == [{"name": "default", "copied": 3, "removed": 0}]
    assert restored == [{"name": "default", "restored": {}, "unchanged": 3, "refused": {}}]


def test_resync_reports_progress_on_standard_error(configured, tables, monkeypatch):
    monkeypatch.setattr("djqueue.management.subcommands.operations.PROGRESS_EVERY", 1_000)
    for _ in range(3):
        f.enqueue_many(configured, 1_000)

    progress = StringIO()
    call_command(djqueue.Command(stderr=progress), "resync", stdout=StringIO())

    assert "jobs so far" in progress.getvalue()


def test_resync_of_empty_storage_is_reported(configured, tables):
    assert "No queues exist" in run("resync")


def test_restore_counts_by_queue_and_outcome(configured, mirror, redis_server):
    f.enqueue_many(configured, 3)
    f.a_delayed_job(configured)
    f.enqueue(configured, unique_key="k", queue="emails")
    copy_all(mirror)
    redis_server.run("FLUSHALL")
    f.enqueue(configured, unique_key="k", queue="emails")

    output = run("restore-from-mirror", "--dry-run")
    assert "default: 4 would be restored (1 delayed, 3 waiting), 0 already in Redis, 0 refused" in output
    assert configured.queues.names() == ["emails"]
    output = run("restore-from-mirror")
    assert "default: 4 restored (1 delayed, 3 waiting), 0 already in Redis, 0 refused" in output
    assert "emails: 0 restored, 1 already in Redis, 1 refused" in output
    assert "1 refused: its unique key is in use by another job" in output
    assert "Nothing to restore" in run("restore-from-mirror")


def test_restore_reports_restored_and_rejected_jobs(capsys):
    said = " ".join(help_of("restore-from-mirror", capsys).split())

    for text in ("--dry-run", "--queue NAME", "can run more than once", "Not restored: failed jobs"):
        assert text in said


def test_help_of_resync_explains_its_purpose(capsys):
    assert "If Redis has lost its data, run restore-from-mirror first" in help_of("resync", capsys)


@pytest.mark.parametrize("action", ["resync", "restore-from-mirror"])
def test_storage_other_than_redis_is_rejected(settings, action):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}

    with pytest.raises(CommandError, match="this command requires the Redis storage"):
        run(action)


def test_disabled_mirror_is_one_error_line(settings, redis_url):
    options = {"URL": redis_url, "MIRROR": False}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}}

    with pytest.raises(CommandError, match="MIRROR or STREAM is off in the settings"):
        run("resync")


def test_unavailable_redis_is_one_error_line(settings, tables):
    options = {"URL": "redis://127.0.0.1:1/0", "TIMEOUT": 0.1}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}}

    with pytest.raises(CommandError, match="Is it running"):
        run("restore-from-mirror")
