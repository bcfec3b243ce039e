"""The stored form of an exception."""

import asyncio
import linecache
import os
import threading

from djqueue.core import sourcelines
from djqueue.core.logs import MAX_TRACEBACK
from djqueue.runtime.tracebacks import MAX_MESSAGE, MAX_TYPE, job_error, stacks
from tests.runtime.running import record, work_off
from tests.support import PATIENCE


class NoWordsError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even a message")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_error_type_is_a_dotted_name():
    assert job_error(ValueError("x")).type == "builtins.ValueError"
    assert job_error(NoWordsError()).type == f"{__name__}.NoWordsError"


def test_long_messages_and_tracebacks_are_truncated_in_the_middle():
    error = job_error(raised(ValueError("begin" + "x" * 50_000 + "end")))

    assert len(error.message) <= MAX_MESSAGE
    assert len(error.traceback) <= MAX_TRACEBACK
    assert error.message.startswith("begin")
    assert error.message.endswith("end")
    assert "[...]" in error.message
    assert error.traceback.startswith("Traceback")


def test_exception_without_a_message_is_stored():
    error = job_error(raised(NoWordsError()))

    assert "RuntimeError" in error.message
    assert "NoWordsError" in error.traceback


def test_characters_that_databases_reject_are_escaped():
    error = job_error(ValueError("a\ud800b\0c"))

    assert error.message == "a\\ud800b\\x00c"
    assert "\0" not in error.traceback


def test_traceback_contains_exception_groups_and_causes():
    inner = raised(KeyError("inner"))
    try:
        raise ExceptionGroup("several", [inner]) from inner
    except ExceptionGroup as error:
        text = job_error(error).traceback

    assert "several" in text
    assert "inner" in text
    assert "direct cause" in text


async def test_traceback_of_a_job_starts_in_its_handler(storage, queue):
    async def handler(job):
        raise ValueError("here")

    def plain(job):
        raise ValueError("there")

    one = queue.enqueue(name="handler", max_attempts=1).id
    two = queue.enqueue(name="plain", max_attempts=1).id
    await work_off(storage, {"handler": handler, "plain": plain})

    for job_id, function in ((one, "handler"), (two, "plain")):
        lines = record(queue, job_id).error.traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1].endswith(f"in {function}")
        assert "djqueue/runtime" not in "\n".join(lines)


def failing_in(filename: str, **names: object) -> BaseException:
    """Return the error of code that was compiled with the name of a file."""
    try:
        exec(compile("raise ValueError('x')", filename, "exec"), {"__name__": "generated", **names})
    except ValueError as caught:
        return caught
    raise AssertionError


class Loader:
    def get_source(self, name: str) -> str:
        raise AssertionError("the project's loader was asked")


def test_tracebacks_read_source_lines_of_small_regular_files_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sourcelines, "MAX_FILE", 1_000)
    (tmp_path / "small.py").write_text("a line of the source\n")
    (tmp_path / "large.py").write_text("a line of the source\n" * 100)
    os.mkfifo(tmp_path / "pipe.py")
    cached = {*linecache.cache}

    texts = {
        name: job_error(failing_in(str(tmp_path / name), __loader__=Loader())).traceback
        for name in ("small.py", "large.py", "pipe.py", "missing.py")
    }

    assert all(name in text and "ValueError: x" in text for name, text in texts.items())
    assert [name for name, text in texts.items() if "a line of" in text] == ["small.py"]
    assert {*linecache.cache} - cached <= {str(tmp_path / "small.py"), __file__}


def test_stacks_read_source_lines_of_small_regular_files_only(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    has_begun, may_end = threading.Event(), threading.Event()
    source = "def wait(): has_begun.set(); may_end.wait()"
    names = {"has_begun": has_begun, "may_end": may_end}
    exec(compile(source, str(tmp_path / "pipe.py"), "exec"), names)
    thread = threading.Thread(target=names["wait"])
    thread.start()
    loop = asyncio.new_event_loop()
    try:
        assert has_begun.wait(PATIENCE)
        assert "pipe.py" in stacks("Stacks", loop)
    finally:
        may_end.set()
        thread.join()
        loop.close()


def test_long_names_of_classes_are_cut():
    error = job_error(type("x" * 100_000, (Exception,), {})())

    assert len(error.type) <= MAX_TYPE
    assert len(error.traceback) <= MAX_TRACEBACK
