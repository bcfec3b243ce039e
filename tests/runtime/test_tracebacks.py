"""The stored form of an exception."""

from djqueue.core.logs import MAX_TRACEBACK
from djqueue.runtime.tracebacks import MAX_MESSAGE, job_error
from tests.runtime.running import record, work_off


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
