"""Types of decorated functions, as mypy sees them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = """
from typing import assert_type
from djqueue import EnqueueResult, Queue, job

@job
def add(a: int, b: int = 1) -> str:
    return str(a + b)

@job(queue="sums", max_attempts=2)
def double(a: int) -> float:
    return 2.0 * a

@job
async def later(a: int) -> bytes:
    return bytes(a)

async def use() -> None:
    assert_type(add(1, b=2), str)
    assert_type(double(1), float)
    assert_type(await later(1), bytes)
    assert_type(add.enqueue(1, b=2), EnqueueResult)
    assert_type(add.using(priority=3)(1), str)
    assert_type(await later.aenqueue(1), EnqueueResult)
    assert_type(await Queue("emails").acounts(), dict[str, int])
    assert_type(await Queue("emails").aclean(60, limit=5), int)
"""


WRONG_CALLS = {
    'add.enqueue("no number")': "arg-type",
    "add.enqueue(1, c=2)": "call-arg",
    "double.enqueue()": "call-arg",
    "add(1, 2, 3)": "call-arg",
    "add.using(priority=1).enqueue(b=2)": "call-arg",
    'wrong = Queue("emails").acancel(1)': "arg-type",
    'missing = Queue("emails").acancel()': "call-arg",
}


@pytest.mark.slow
def test_type_checker_accepts_right_calls_and_rejects_wrong_ones(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)  # for the settings of mypy, and its cache, which `make lint` has filled
    path = tmp_path / "shop.py"
    path.write_text(TEXT + "\n".join(WRONG_CALLS))

    output, problems, _ = mypy.run(["--strict", "--no-error-summary", "--hide-error-context", str(path)])

    assert not problems
    errors = [line for line in output.splitlines() if ": error: " in line]
    first = TEXT.count("\n") + 1
    expected = list(enumerate(WRONG_CALLS.values(), start=first))
    assert [(int(line.split(":")[1]), line.rpartition("[")[2][:-1]) for line in errors] == expected
