"""Types of jobs, queues and tasks, as mypy and pyright see them, and the options that they know."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import djqueue
from djqueue.client import JobKeywords, QueueKeywords, UsingKeywords
from djqueue.client.jobs import CALLING
from djqueue.client.keywords import HandlerKeywords, ScheduleKeywords
from djqueue.contrib.tasks import DjqueueTask, task
from djqueue.core.options import PARSERS, EnqueueOptions, JobOptions
from djqueue.schedules import SCHEDULE_PARSERS, Schedule

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).with_name("type_examples")
RIGHT, WRONG = EXAMPLES / "right.py", EXAMPLES / "wrong.py"
MARK = re.compile(r"  # mypy: ([\w-]+); pyright: (\w+(?: \w+)*)$")
"""The codes of the errors, at the end of a wrong line."""
INTERNAL = {"backoff_given", "dependents", "rejected", "job"}
"""Fields of options that callers do not give."""

Errors = list[tuple[str, int, str]]


def expected(checker: int) -> Errors:
    """The errors of the examples: file, line and code. `checker` is the code's position in the mark."""
    lines = enumerate(WRONG.read_text(encoding="utf-8").splitlines(), start=1)
    marks = ((line, mark) for line, text in lines if (mark := MARK.search(text)))
    return [(WRONG.name, line, code) for line, mark in marks for code in mark[checker].split()]


@pytest.mark.slow
def test_mypy_accepts_right_examples_and_reports_each_wrong_one(monkeypatch):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install -e '.[dev]'")
    monkeypatch.chdir(ROOT)  # for the settings of mypy, and its cache, which `make lint` has filled

    output, problems, _ = mypy.run(
        ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty", str(RIGHT), str(WRONG)]
    )

    assert not problems
    found = re.findall(r"^(.+?):(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE)
    errors = {(Path(name).name, int(line), code) for name, line, code in found}
    assert sorted(errors) == expected(1), output


@pytest.mark.slow
def test_pyright_accepts_right_examples_and_reports_each_wrong_one(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: pip install -e '.[dev]'")
    config = tmp_path / "pyrightconfig.json"
    settings = {
        "typeCheckingMode": "standard",
        "include": [str(RIGHT), str(WRONG)],
        "extraPaths": [str(ROOT)],
    }
    config.write_text(json.dumps(settings))

    arguments = ["--project", config, "--pythonpath", sys.executable, "--outputjson"]
    finished = subprocess.run(
        [sys.executable, "-m", "basedpyright", *arguments], capture_output=True, text=True
    )

    found = json.loads(finished.stdout)["generalDiagnostics"]
    errors = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one.get("rule", one["message"]))
        for one in found
        if one["severity"] == "error"
    }
    assert sorted(errors) == expected(2), finished.stdout


def test_type_checkers_know_exactly_the_options_that_are_parsed():
    of_jobs = {item.name for kind in (JobOptions, EnqueueOptions) for item in fields(kind) if item.init}

    assert QueueKeywords.__optional_keys__ | {"queue"} == PARSERS.keys() == of_jobs - INTERNAL
    assert ScheduleKeywords.__optional_keys__ == SCHEDULE_PARSERS.keys() == {f.name for f in fields(Schedule)}


def test_using_and_job_have_the_options_of_a_queue_and_their_own():
    of_both = PARSERS.keys() | {"check_arguments"}

    assert UsingKeywords.__optional_keys__ == of_both | CALLING.keys() | {"id"}
    assert JobKeywords.__optional_keys__ == of_both | {"name", "redact"} | (
        HandlerKeywords.__optional_keys__ | SCHEDULE_PARSERS.keys()
    )


def test_job_type_accepts_type_arguments_with_and_without_what_a_call_returns():
    assert djqueue.JobType[[int], str].__args__ == ([int], str)
    assert djqueue.JobType[..., bytes, object].__origin__ is djqueue.JobType


def test_signatures_show_names_in_place_of_addresses():
    public = {name: getattr(djqueue, name) for name in djqueue.__all__} | {
        "DjqueueTask": DjqueueTask,
        "task": task,
    }
    methods = {
        f"{name}.{method}": function
        for name, value in public.items()
        if inspect.isclass(value)
        for method, function in inspect.getmembers(value, inspect.isfunction)
    }
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}

    signatures = {name: str(inspect.signature(value)) for name, value in (methods | functions).items()}

    assert "wait: Any = UNSET" in (signatures["JobType.enqueue_and_wait"])
    assert {name: text for name, text in signatures.items() if " object at 0x" in text} == {}
