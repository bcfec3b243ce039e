"""The command line, and the storage that it takes from the settings, without Spark."""

import re
import subprocess
import sys
from argparse import ArgumentParser
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from djqueue.conf import get_settings
from djqueue.contrib.spark.pipeline import commands, session
from djqueue.contrib.spark.pipeline.commands import add_commands, main, parser
from djqueue.contrib.spark.pipeline.session import SparkError, error_of, readable_errors
from djqueue.contrib.spark.project import storage_options
from djqueue.core.errors import OptionError

ROOT = Path(__file__).parents[4]
URL = "redis://127.0.0.1:6379/0"
REDIS = "djqueue.storage.redis.RedisStorage"


def parsed(*words):
    return parser().parse_args([words[0], "--url", URL, *words[1:]])


def test_parser_has_every_command():
    actions = parser()._subparsers._group_actions
    assert set(actions[0].choices) == commands.COMMANDS.keys()


def test_documentation_page_lists_every_command():
    page = (ROOT / "docs" / "spark-pipeline.md").read_text()
    assert commands.COMMANDS.keys() <= set(re.findall(r"^## (\w+)$", page, re.MULTILINE))


def test_help_requires_neither_spark_nor_a_project():
    code = "import sys; sys.modules['pyspark'] = None; import runpy; sys.argv[1:] = ['archive', '--help']\n"
    code += "runpy.run_module('djqueue.contrib.spark', run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Running a day again replaces its files" in shown


def test_days_and_hours_are_parsed_as_utc():
    args = parsed("rollups", "--since", "2026-01-31T05", "--until", "2026-01-31T08:00+02:00")
    assert (args.since, args.until) == tuple(datetime(2026, 1, 31, hour, tzinfo=UTC) for hour in (5, 6))
    assert parsed("archive", "/a", "--since", "2026-01-31").since == date(2026, 1, 31)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["archive", "/a", "--since", "31.1.2026"], "'31.1.2026' is invalid: expected a day like 2026-01-31"),
        (["archive", "/a", "--states", "done"], "'done' is not one of cancelled, completed, failed"),
        (["rollups", "--since", "2026-01-31T05:30"], "like 2026-01-31T05"),
        (["archive", "/a", "--conf", "spark"], "'spark' does not have the form NAME=VALUE"),
        (["archive"], "the following arguments are required: PATH"),
    ],
)
def test_invalid_argument_exits_with_the_usage_error_code(words, message, capsys):
    with pytest.raises(SystemExit) as raised:
        parsed(*words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_error_without_spark_names_the_package_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    for name in [name for name in sys.modules if name.startswith("pyspark.")]:
        monkeypatch.setitem(sys.modules, name, None)

    assert main(["archive", "/a", "--url", URL]) == 1
    assert "pip install djqueue[spark]" in capsys.readouterr().err


def test_storage_url_is_required_only_without_a_project():
    args = ["rollups", "--since", "2026-01-31T05"]
    project = ArgumentParser()
    add_commands(project, is_project=True)
    assert project.parse_args(args).url is None
    with pytest.raises(SystemExit):
        parser().parse_args(args)


def test_error_of_spark_is_reported_by_its_reason():
    trace = 'Job aborted.\nTraceback:\n  File "x"\ndjqueue.contrib.spark.rows.RowError: row 3: no text\n'
    option = trace.replace("contrib.spark.rows.RowError", "core.errors.OptionError")
    java = "[PATH_NOT_FOUND] no /a.\n\nJVM stacktrace:\nat x"
    for text, kind, message in (
        (trace, SparkError, "row 3: no text"),
        (option, OptionError, "row 3: no text"),
        (java, SparkError, "[PATH_NOT_FOUND] no /a."),
    ):
        error = error_of(text)
        assert (type(error), str(error)) == (kind, message)


@pytest.mark.spark
def test_only_errors_of_spark_are_converted():
    pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")

    class Raised(Exception):
        __module__ = "pyspark.errors.exceptions.captured"

    with pytest.raises(SparkError, match=r"^no /a\.$"), readable_errors():
        raise Raised("no /a.\n\nJVM stacktrace:\nat x")
    with pytest.raises(ZeroDivisionError), readable_errors():
        raise ZeroDivisionError


# With a project.


@pytest.mark.parametrize(
    "options",
    [
        {"URL": "rediss://:secret@redis.example/1", "PREFIX": "shop"},
        {"CACHE": "jobs", "PREFIX": "shop"},
    ],
)
def test_storage_of_the_settings_is_the_default(settings, options):
    settings.CACHES = {
        "jobs": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "rediss://:secret@redis.example/1",
        }
    }
    settings.DJQUEUE = {"STORAGE": {"BACKEND": REDIS, "OPTIONS": {**options, "MIRROR": False}}}

    assert storage_options(get_settings()) == {"url": "rediss://:secret@redis.example/1", "keyPrefix": "shop"}


def test_storage_that_no_url_describes_must_be_given_as_an_option(settings):
    options = {"SENTINELS": [("127.0.0.1", 1)], "MASTER_NAME": "m", "MIRROR": False}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": REDIS, "OPTIONS": options}}

    with pytest.raises(CommandError, match="pass it with --url") as raised:
        call_command("djqueue_spark", "rollups")
    assert raised.value.returncode == 1


@pytest.mark.spark
def test_running_session_is_used_and_not_stopped(monkeypatch):
    class Running:
        @staticmethod
        def getActiveSession():
            return Running

    pyspark = pytest.importorskip("pyspark.sql", reason="Spark is not installed here: see make test-spark")
    monkeypatch.setattr(pyspark, "SparkSession", Running)
    with session.session("a", "local", {}) as spark:
        assert spark is Running
