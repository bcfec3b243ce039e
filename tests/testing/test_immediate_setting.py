"""The setting `IMMEDIATE`: development without a worker."""

import pytest
from django.core.checks import run_checks

from djqueue import job
from djqueue.client import get_storage
from djqueue.runtime.immediate import ImmediateStorage


@pytest.fixture(autouse=True)
def _immediate(settings):
    # The options of the storage must not reach the one of IMMEDIATE.
    database = {"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {"DATABASE": "default"}}
    settings.DJQUEUE = {"IMMEDIATE": True, "STORAGE": database}


def test_immediate_setting_runs_jobs_in_memory_at_enqueue():
    ran = []

    @job(name="note")
    def note(value):
        ran.append(value)
        return value

    assert note.enqueue_and_wait(1) == 1
    assert ran == [1]
    assert isinstance(get_storage(), ImmediateStorage)


def test_immediate_setting_records_failures_without_raising():
    @job(name="fail", max_attempts=1)
    def fail():
        raise KeyError("broken")

    assert fail.enqueue().job().state == "failed"


def test_immediate_setting_is_off_for_the_fixtures(djqueue_memory):
    @job(name="note")
    def note():
        raise AssertionError("must not run")

    assert note.enqueue().job().state == "waiting"


def test_only_the_deployment_check_warns_about_immediate():
    assert "djqueue.W019" not in [message.id for message in run_checks(tags=["djqueue"], databases=[])]
    messages = run_checks(tags=["djqueue"], include_deployment_checks=True, databases=[])
    [warning] = [message for message in messages if message.id == "djqueue.W019"]
    assert "IMMEDIATE" in warning.msg


def test_immediate_setting_must_be_a_bool(settings):
    settings.DJQUEUE = {"IMMEDIATE": "yes"}

    [error] = [each for each in run_checks(tags=["djqueue"], databases=[]) if each.id == "djqueue.E001"]

    assert "must be True or False" in error.msg
