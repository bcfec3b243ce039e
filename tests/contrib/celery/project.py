"""A Django project with a Celery app, for `runworkers --celery`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

from tests.runtime.project import ROOT, Project
from tests.support import PATIENCE

CELERY = """
    import os
    from celery import Celery

    app = Celery("proj")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    app.autodiscover_tasks(["shop"])
"""
TASKS = """
    import os
    import time
    from pathlib import Path
    from celery import shared_task
    from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

    HERE = Path(__file__).parent.parent


    @shared_task
    def add(x, y):
        return x + y


    @shared_task(rate_limit="10/m")
    def limited():
        pass


    @shared_task
    def total(numbers):
        return sum(numbers)


    @shared_task
    def broken(text):
        raise ValueError(text)


    @shared_task
    def on_error(request, error, traceback):
        (HERE / "on_error.txt").write_text(f"{request.id} {error}")


    @shared_task(bind=True, max_retries=5)
    def third_time(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0.05)
        return self.request.retries


    @shared_task(soft_time_limit=0.3)
    def slow():
        try:
            while True:
                time.sleep(0.01)
        except SoftTimeLimitExceeded:
            return "soft"


    @shared_task(time_limit=0.3)
    def stubborn():
        while True:
            try:
                while True:
                    time.sleep(0.01)
            except Exception:
                pass


    @shared_task(acks_late=True)
    def rejecting():
        raise Reject("no", requeue=False)


    @shared_task(bind=True)
    def about(self):
        info = self.request.delivery_info
        return [self.request.id, info["routing_key"], self.request.origin, self.request.is_eager]


    @shared_task
    def touch(name):
        with (HERE / name).open("a") as file:
            file.write("x")


    @shared_task(acks_late=True)
    def hold(name):
        touch(name)
        (HERE / f"{name}.pid").write_text(str(os.getpid()))
        while (HERE / "held").exists():
            time.sleep(0.02)


    @shared_task
    def hold_early(name):
        hold(name)
"""


PRODUCER = """
import json, sys, traceback
import django
django.setup()
setup = '''
import time
from celery import chain, chord, group
from proj import app
from shop.tasks import *
from tests.support import eventually
'''
for line in sys.stdin:
    names = {}
    try:
        exec(setup, names)
        exec(json.loads(line), names)
        answer = {"result": names["result"]}
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(f"ANSWER {json.dumps(answer)}", flush=True)
"""


class CeleryProject(Project):
    """A project whose Celery app is `proj:app`. `run` executes Python code in one of its producers.

    `with` ends the producer process.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        super().__init__(folder, "", settings)
        (folder / "proj.py").write_text(dedent(CELERY))
        (folder / "shop" / "tasks.py").write_text(dedent(TASKS))
        self._producer = subprocess.Popen(
            [sys.executable, "-c", PRODUCER],
            cwd=folder,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "project_settings",
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str) -> Any:
        """Run code that assigns a JSON value to `result`, and return it."""
        assert self._producer.stdin is not None
        assert self._producer.stdout is not None
        print(json.dumps(dedent(code)), file=self._producer.stdin, flush=True)
        for line in self._producer.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                assert "error" not in answer, answer["error"]
                return answer["result"]
        raise AssertionError("the producer has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.communicate(timeout=PATIENCE)
