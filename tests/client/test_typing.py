"""Types of decorated functions, checked by mypy."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = """
from typing import assert_type
from djqueue import EnqueueResult, job

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
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The errors that mypy finds in a text, as (line behind TEXT, code)."""
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)

    def check(more):
        path = tmp_path / "shop.py"
        path.write_text(TEXT + more)
        output, problems, _ = mypy.run(["--no-error-summary", "--hide-error-context", str(path)])
        assert not problems
        # The options are those of pyproject.toml (strict), whose cache `make lint` has filled.
        offset = TEXT.count("\n")
        lines = [line for line in output.splitlines() if ": error: " in line]
        return [(int(line.split(":")[1]) - offset, line.rpartition("[")[2][:-1]) for line in lines]

    return check


@pytest.mark.slow
def test_type_checker_accepts_typed_calls_and_reports_wrong_arguments(check):
    more = [
        'add.enqueue("no number")',
        "add.enqueue(1, c=2)",
        "double.enqueue()",
        "add(1, 2, 3)",
        "add.using(priority=1).enqueue(b=2)",
    ]

    assert check("\n".join(more)) == [
        (1, "arg-type"),
        (2, "call-arg"),
        (3, "call-arg"),
        (4, "call-arg"),
        (5, "call-arg"),
    ]
