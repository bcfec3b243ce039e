"""Invalid `DJQUEUE` settings are errors of every command, whatever a project imports first."""

import json
import os
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import PATIENCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", {apps}
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{{
    "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "OPTIONS": {{"context_processors": [
        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]}},
}}]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}}}}
ROOT_URLCONF = "project_urls"
USE_TZ = True
DJQUEUE = {given}
"""
URLS = """
from django.contrib import admin
from django.urls import path

import djqueue.dashboard.urls
import shop.views

urlpatterns = [path("admin/", admin.site.urls)]
"""
JOBS = """
from djqueue import Limiter, Queue, job

@job(queue="emails", max_attempts=5, cron="@daily")
def send(): ...

@job
def other(): ...

emails = Queue("emails", priority=3)
urgent = send.using(priority=9)
"""
INVALID = {
    "an unknown key": ({"STORGE": {}}, "djqueue.E001"),
    "a wrong value": ({"QUEUES": {"emails": {"RATE": "fast"}}}, "djqueue.E001"),
    "not a dict": (["emails"], "djqueue.E001"),
    "None": (None, "djqueue.E001"),
    "wrong defaults": ({"DEFAULTS": {"max_attempts": 0}}, "djqueue.E001"),
    "wrong modules": ({"MODULES": "tasks"}, "djqueue.E001"),
    "odd keys": ({1: 2, None: 3}, "djqueue.E001"),
    "an unknown limiter": ({"QUEUES": {"emails": {"LIMITER": "stripe"}}}, "djqueue.E008"),
    "an odd limiter": ({"QUEUES": {"emails": {"LIMITER": ["stripe"]}}}, "djqueue.E001"),
    "odd limiters": ({"LIMITERS": 5, "QUEUES": {"emails": {"LIMITER": "stripe"}}}, "djqueue.E001"),
    "a closed list of queues": ({"STRICT_QUEUES": True, "QUEUES": ["mails"]}, "djqueue.E009"),
    "a missing module": ({"MODULES": ["shop.nothing"]}, "djqueue.E010"),
    "an unknown storage": ({"STORAGE": {"BACKEND": "nowhere.Storage"}}, "djqueue.E002"),
}
APPS = {"djqueue first": '"djqueue", "shop"', "djqueue last": '"shop", "djqueue"'}
IMPORTED_BY = ["nothing", "models", "views", "apps"]
"""The module of the app that imports the jobs."""
REPORTED = {
    "an unknown key": ["DJQUEUE['STORGE'] is not a setting"],
    "a closed list of queues": [
        "Job 'shop.jobs.send': queue 'emails' is not in DJQUEUE['QUEUES']",
        "did you mean 'mails'?",
    ],
    "a missing module": ["DJQUEUE['MODULES']: 'shop.nothing' cannot be imported"],
}
"""Texts of the errors."""
COMMANDS = {"runworkers": ["runworkers"], "migrate": ["migrate"], "djqueue": ["djqueue", "workers"]}
RUNNER = """
import json, os, sys
import django.contrib.admin.options, django.core.management, django.db.models, django.forms
import cronsim, kombu, msgpack, redis

for folder, command in json.load(sys.stdin):
    if not (process := os.fork()):
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(os.open("output", os.O_CREAT | os.O_WRONLY), 2)
        try:
            django.core.management.execute_from_command_line(["manage.py", *command])
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 70
        else:
            code = 0
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
"""Runs commands of projects, each in a fork of a process that has imported Django, but not djqueue."""


class Case(NamedTuple):
    """A command of a project: its settings, its apps, and the module that imports its jobs."""

    setting: str
    command: str = "check"
    apps: str = "djqueue last"
    imported_by: str = "models"


def write_project(folder: Path, case: Case) -> None:
    shop = folder / "shop"
    shop.mkdir(parents=True)
    files = dict.fromkeys(("__init__", "models", "views"), "")
    files["jobs"] = JOBS
    files["apps"] = "from django.apps import AppConfig\n\nclass Shop(AppConfig):\n    name = 'shop'\n"
    if case.imported_by == "apps":
        files["apps"] += "    def ready(self):\n        import shop.jobs\n"
    elif case.imported_by != "nothing":
        files[case.imported_by] += "import shop.jobs\n"
    for name, text in files.items():
        (shop / f"{name}.py").write_text(text)
    settings = SETTINGS.format(apps=APPS[case.apps], given=repr(INVALID[case.setting][0]))
    (folder / "project_settings.py").write_text(settings)
    (folder / "project_urls.py").write_text(URLS)


def failures(folder: Path, cases: list[Case]) -> dict[Case, str]:
    """Run the cases; return the outputs that do not report the setting."""
    folders = [folder / str(number) for number in range(len(cases))]
    for one, case in zip(folders, cases, strict=True):
        write_project(one, case)
    commands = [COMMANDS.get(case.command, [case.command]) for case in cases]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(list(zip(map(str, folders), commands, strict=True))),
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONDONTWRITEBYTECODE": "",  # compiled once, not for each project
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=5 * PATIENCE,
        check=True,
    )
    found: dict[Case, str] = {}
    for one, case, code in zip(folders, cases, done.stdout.split(), strict=True):
        output = (one / "output").read_text()
        expected = [f"({INVALID[case.setting][1]})", *REPORTED.get(case.setting, [])]
        if code != "1" or "Traceback" in output or not all(part in output for part in expected):
            found[case] = f"{code}: {output}"
    return found


@pytest.mark.parametrize("part", range(3))
def test_invalid_settings_are_errors_of_the_check_command(tmp_path: Path, part: int) -> None:
    projects = cycle(product(APPS, IMPORTED_BY))
    cases = [Case(setting, "check", *next(projects)) for setting in INVALID]

    assert failures(tmp_path, cases[part::3]) == {}


@pytest.mark.thorough
def test_an_invalid_setting_is_reported_whatever_a_project_imports_first(tmp_path: Path) -> None:
    cases = [Case("an unknown key", "check", *case) for case in product(APPS, IMPORTED_BY)]

    assert failures(tmp_path, cases) == {}


COMMANDS_AND_SETTINGS = [
    Case("an unknown key", "runworkers", imported_by="views"),
    Case("not a dict", "migrate", imported_by="views"),
    Case("an unknown limiter", "djqueue", imported_by="views"),
    Case("a closed list of queues", "runworkers", imported_by="views"),
    Case("a missing module", "migrate", imported_by="views"),
]


def test_other_commands_report_invalid_settings(tmp_path: Path) -> None:
    assert failures(tmp_path, COMMANDS_AND_SETTINGS) == {}


@pytest.mark.thorough
def test_every_command_reports_every_kind_of_invalid_setting(tmp_path: Path) -> None:
    settings = dict.fromkeys(case.setting for case in COMMANDS_AND_SETTINGS)
    cases = [Case(*pair, imported_by="views") for pair in product(settings, COMMANDS)]

    assert failures(tmp_path, cases) == {}
