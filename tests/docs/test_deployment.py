"""Files and recipes of docs/deployment.md: their commands exist, and what this machine can run is run."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from djqueue.contrib.metrics import urls, views
from tests.support import PATIENCE

from .pages import ROOT, blocks, check_management_command

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
UNITS = sorted(DEPLOY.glob("*.service")) + sorted(DEPLOY.glob("*.timer"))
PROCFILE = dict(re.findall(r"^(\w+): (.*)$", (DEPLOY / "Procfile").read_text(), re.MULTILINE))


def unit(name: str) -> dict[str, str]:
    """The settings of a unit of systemd."""
    return dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / name).read_text(), re.MULTILINE))


def pods() -> dict[str, dict[str, Any]]:
    """The pods of the Kubernetes objects, by name of the object."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in OBJECTS
        if "template" in one["spec"]
    }


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of all files, each with the name of its file."""
    [command] = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    yield "Dockerfile", ast.literal_eval(command)
    for service in COMPOSE["services"].values():
        if "command" in service:
            yield "compose.yaml", service["command"]
    for pod in pods().values():
        yield "kubernetes.yaml", pod["containers"][0]["command"]
    for path in DEPLOY.glob("*.service"):
        yield path.name, shlex.split(unit(path.name)["ExecStart"])
    for line in PROCFILE.values():
        yield "Procfile", shlex.split(line)


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


WORKERS = [(name, words) for name, words in commands() if "runworkers" in words]


def test_commands_of_manage_py_exist(subtests) -> None:
    checked = set()
    for name, words in commands():
        assert isinstance(words, list), f"{name}: a shell would get the signals"
        if "manage.py" in words:
            with subtests.test(name):
                check_management_command(words[words.index("manage.py") + 1 :])
                checked.add(words[words.index("manage.py") + 1])

    assert checked == {"runworkers", "migrate", "djqueue"}
    assert {name for name, _ in WORKERS} == {
        *("Dockerfile", "compose.yaml", "kubernetes.yaml", "shop-workers.service", "Procfile"),
    }


def test_workers_have_time_to_return_their_jobs() -> None:
    given = {
        "Dockerfile": None,  # compose.yaml and kubernetes.yaml say how long
        "compose.yaml": int(COMPOSE["services"]["workers"]["stop_grace_period"].removesuffix("s")),
        "kubernetes.yaml": pods()["shop-workers"]["terminationGracePeriodSeconds"],
        "shop-workers.service": int(unit("shop-workers.service")["TimeoutStopSec"]),
        "Procfile": 30,  # what Heroku gives
    }
    for name, words in WORKERS:
        seconds = given[name]
        assert seconds is None or seconds - int(flag(words, "--shutdown-timeout")) >= 15, name


def test_probes_look_at_the_health_file_of_their_workers() -> None:
    health = COMPOSE["services"]["workers"]["healthcheck"]["test"]
    container = pods()["shop-workers"]["containers"][0]
    probes = [" ".join(container[name]["exec"]["command"]) for name in ("startupProbe", "livenessProbe")]

    files = {flag(words, "--health-file") for _, words in WORKERS if "--health-file" in words}
    [file] = files
    for probe in (" ".join(health).replace("$$", "$"), *probes):
        assert f"$(find {file} -newermt '-15 seconds')" in probe
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 60


def test_compose_file_refers_to_what_it_defines() -> None:
    services = COMPOSE["services"]
    needed = {name for one in services.values() for name in one.get("depends_on", {})}
    volumes = {volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ())}

    assert needed <= {*services}
    assert volumes == {*COMPOSE["volumes"]}
    for name, one in services.items():
        for other, how in one.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], name
    assert "noeviction" in services["redis"]["command"]


def test_kubernetes_objects_refer_to_each_other() -> None:
    named = {(one["kind"], one["metadata"]["name"]): one for one in OBJECTS}
    assert len(named) == len(OBJECTS)

    for (kind, _), one in named.items():
        spec = one["spec"]
        if kind == "Deployment":
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        if kind == "Service":
            [container] = named["Deployment", spec["selector"]["app"]]["spec"]["template"]["spec"][
                "containers"
            ]
            assert spec["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]
    scaled = named["ScaledObject", "shop-workers"]["spec"]
    [trigger] = scaled["triggers"]
    assert ("Deployment", scaled["scaleTargetRef"]["name"]) in named
    assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in named
    # Both would set the number of pods.
    assert "replicas" not in named["Deployment", scaled["scaleTargetRef"]["name"]]["spec"]
    assert trigger["metadata"]["url"].removeprefix("http://").split("/")[0] == "shop-web"


def test_scaling_url_and_token_are_those_of_the_package() -> None:
    [url] = [
        one["spec"]["triggers"][0]["metadata"]["url"] for one in OBJECTS if one["kind"] == "ScaledObject"
    ]
    [secret] = [
        one["spec"]["secretTargetRef"][0] for one in OBJECTS if one["kind"] == "TriggerAuthentication"
    ]

    assert url.rpartition("/")[2] in {str(one.pattern) for one in urls.urlpatterns}
    assert secret["key"] == views.TOKEN_VARIABLE


@pytest.mark.slow
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for path in UNITS:
        # Programs and users have to exist.
        text = re.sub(r"/srv/shop/venv/bin/\w+", "/bin/sh", path.read_text())
        text = text.replace("User=shop\n", "User=root\n").replace("/srv/shop", str(tmp_path))
        (tmp_path / path.name).write_text(re.sub(r"^OnFailure=.*\n", "", text, flags=re.MULTILINE))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / path.name) for path in UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.mark.slow
def test_gunicorn_accepts_its_settings(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("def application(environ, start_response):\n    return []\n")
    gunicorn = (sys.executable, "-m", "gunicorn")
    checked = subprocess.run(
        [*gunicorn, "--check-config", "--config", DEPLOY / "gunicorn.conf.py", "shop:application"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr


# Recipes: a project is made from the page's blocks, and runs two jobs.

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = ["djqueue", "shop"]
USE_TZ = True
{block}
DJQUEUE["STORAGE"] = {{"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
"""
JOBS = """
import logging

from djqueue import Discard, job

logger = logging.getLogger("shop")


@job(max_attempts=1)
def fails():
    logger.info("about to fail")
    raise ValueError("no route")


@job(max_attempts=1)
async def discards():
    raise Discard("not needed any more")
"""
RUN = f"""
import django

django.setup()
{{before}}
from djqueue import Worker
from djqueue.errors import JobError
from shop.jobs import discards, fails

with Worker():
    for each in (fails, discards):
        try:
            each.enqueue_and_wait(wait={PATIENCE})
        except JobError as error:
            print(type(error).__name__)
{{after}}
"""
CAPTURING = """
import json, sentry_sdk
from sentry_sdk.transport import Transport

events = []


class Capturing(Transport):
    def capture_envelope(self, envelope):
        events.extend(item.get_event() for item in envelope.items if item.get_event())


sentry_sdk.init(dsn="https://key@sentry.example/1", transport=Capturing)
"""
PRINTING = """
for event in events:
    [error] = event["exception"]["values"]
    print(json.dumps([error["type"], event["transaction"], event["tags"]["queue"], event["contexts"]["job"]]))
"""


def run_recipe(
    folder: Path, word: str, before: str = "", after: str = "", **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Run the jobs in a project with the recipe whose settings contain a word."""
    code = blocks(ROOT / "docs" / "deployment.md", "py")
    [settings] = [one.text for one in code if one.heading == "settings.py" and word in one.text]
    shop = folder / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "settings.py").write_text(SETTINGS.format(block=settings))
    (shop / "jobs.py").write_text(JOBS)
    for one in code:
        if one.heading.startswith("shop/"):
            (folder / one.heading).write_text(one.text)
    (folder / "run.py").write_text(RUN.format(before=before, after=after))
    finished = subprocess.run(
        [sys.executable, "run.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[:2] == ["MaxRetriesError", "JobCancelledError"], finished.stderr
    return finished


@pytest.mark.slow
def test_sentry_gets_each_failure_once_and_no_discarded_job(tmp_path: Path) -> None:
    dsn = "https://key@sentry.example/1"
    finished = run_recipe(tmp_path, "sentry_sdk", CAPTURING, PRINTING, SENTRY_DSN=dsn)

    [event] = [json.loads(line) for line in finished.stdout.splitlines()[2:]]
    kind, transaction, queue, job = event
    assert (kind, transaction, queue) == ("ValueError", "shop.jobs.fails", "default")
    assert job["attempt"] == 1
    assert job["id"]


@pytest.mark.slow
def test_log_lines_of_handlers_and_of_the_worker_are_json_with_the_job(tmp_path: Path) -> None:
    finished = run_recipe(tmp_path, "structlog")

    lines = [json.loads(line) for line in finished.stderr.splitlines()]
    [ours] = [line for line in lines if line["logger"] == "shop"]
    [failure] = [line for line in lines if line["logger"] == "djqueue.worker" and "exception" in line]
    assert (ours["event"], ours["job"], ours["attempt"]) == ("about to fail", "shop.jobs.fails", 1)
    assert ours["job_id"] == failure["job_id"]
    assert "no route" in failure["exception"]
