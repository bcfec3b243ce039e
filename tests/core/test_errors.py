"""The tree of errors."""

import re
import subprocess
import sys
from inspect import cleandoc

import pytest

from djqueue.core import errors
from djqueue.core.errors import (
    DjqueueError,
    JobLimitError,
    JobMemoryLimitError,
    JobTimeoutError,
    MaxRetriesError,
    OptionError,
    ResultTimeoutError,
    by_code,
)
from tests.support import PATIENCE


def tree(root):
    yield root
    for branch in root.__subclasses__():
        yield from tree(branch)


PUBLIC = [
    error
    for error in tree(DjqueueError)
    if error.__module__ == errors.__name__ and not error.__name__.startswith("_")
]


@pytest.mark.parametrize("error", PUBLIC, ids=lambda error: error.__name__)
def test_error_message_defaults_to_the_docstring(error):
    assert str(error()) == cleandoc(error.__doc__).splitlines()[0]
    assert str(error("other words")) == "other words"


@pytest.mark.parametrize("documentation", [None, "", "  \n "], ids=repr)
def test_error_without_a_docstring_has_the_message_of_its_base(documentation):
    for error in PUBLIC:
        own = type("Own", (error,), {"__doc__": documentation})

        assert str(own()) == str(error())


def test_errors_have_messages_when_python_strips_docstrings():
    code = "from djqueue.errors import Discard, JobError; print(repr(Discard()), repr(JobError()))"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )

    assert done.stdout == "Discard('Discard') JobError('JobError')\n"


@pytest.mark.parametrize("error", PUBLIC, ids=lambda error: error.__name__)
def test_code_identifies_the_error_class(error):
    found = by_code(error.code, "far away")

    assert type(found) is error
    assert str(found) == "far away"


def test_error_codes_are_unique():
    codes = [error.code for error in PUBLIC]

    assert len(codes) == len(set(codes))


def test_unknown_code_becomes_a_generic_error():
    assert type(by_code("of a later version", "words")) is DjqueueError


def test_documented_error_tree_matches_the_classes():
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)

    assert sorted(drawn) == sorted(error.__name__ for error in PUBLIC if error is not DjqueueError)


def test_errors_inherit_from_matching_builtin_exceptions():
    assert issubclass(OptionError, ValueError)
    assert issubclass(JobTimeoutError, TimeoutError)
    assert issubclass(ResultTimeoutError, TimeoutError)
    assert not issubclass(ResultTimeoutError, JobTimeoutError)
    assert issubclass(JobMemoryLimitError, JobLimitError)
    assert issubclass(JobMemoryLimitError, MemoryError)
    assert MaxRetriesError("m", payload={"n": 1}, job_id="a").payload == {"n": 1}
