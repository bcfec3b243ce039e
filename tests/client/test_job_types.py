"""`@job`: functions that can be enqueued."""

import asyncio
import inspect
from datetime import timedelta

import pytest

from djqueue import JobType, job
from djqueue.client import registry
from djqueue.core.backoff import Backoff
from djqueue.core.errors import JobNameError
from djqueue.errors import OptionError, UnknownJobError


def add(a: int, b: int = 1, *, c: int = 0) -> int:
    """Add numbers."""
    return a + b + c


async def aadd(a: int, b: int) -> int:
    return a + b


def test_job_type_is_named_by_its_dotted_path():
    assert job(add).name == "tests.client.test_job_types.add"
    assert job(queue="sums")(add).name == "tests.client.test_job_types.add"
    assert registry.names() == ["tests.client.test_job_types.add"]


def test_job_type_can_have_an_explicit_name():
    assert job(name="sum.of:numbers")(add).name == "sum.of:numbers"
    assert registry.get("sum.of:numbers").function is add


@pytest.mark.parametrize("decorate", [job, job(), job(queue="sums", max_attempts=2)])
def test_decorated_function_is_still_callable(decorate):
    decorated = decorate(add)

    assert isinstance(decorated, JobType)
    assert decorated(2, b=3, c=4) == 9
    assert decorated.__name__ == "add"
    assert decorated.__doc__ == "Add numbers."
    assert inspect.signature(decorated) == inspect.signature(add)
    assert repr(decorated) == "<job tests.client.test_job_types.add>"


def test_decorated_coroutine_function_can_be_awaited():
    decorated = job(aadd)

    assert asyncio.run(decorated(2, 3)) == 5


def test_calling_job_type_stores_nothing(storage):
    job(add)(1)

    assert storage.queues.names() == []


def test_decorator_sets_options():
    decorated = job(queue="sums", priority=3, max_attempts=5, timeout=2.5, delay=timedelta(minutes=1))(add)

    assert decorated.options.queue == "sums"
    assert decorated.options.delay == 60_000
    options = decorated.options.job
    assert (options.priority, options.max_attempts, options.timeout) == (3, 5, 2_500)


def test_two_functions_with_the_same_name_are_rejected():
    job(name="sum")(add)

    with pytest.raises(JobNameError, match=r"'sum'.*test_job_types\.add and .*test_job_types\.aadd.*name="):
        job(name="sum")(aadd)
    assert registry.get("sum").function is add


def test_redefined_function_replaces_itself():
    """As when its module is reloaded."""

    def define(result):
        @job(name="again")
        def again():
            return result

        return again

    define(1)
    define(2)

    assert registry.get("again")() == 2


def test_one_function_can_be_two_job_types():
    job(name="fast", priority=9)(add)
    job(name="slow", priority=-9)(add)

    assert registry.get("fast").options.job.priority == 9
    assert registry.get("slow").options.job.priority == -9


def test_unknown_job_name_raises_with_a_suggestion():
    job(name="shop.jobs.send_receipt")(add)

    with pytest.raises(UnknownJobError, match=r"'shop.jobs.send_reciept'.*'shop.jobs.send_receipt'"):
        registry.get("shop.jobs.send_reciept")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempt": 3}, r"unknown option 'max_attempt'; did you mean 'max_attempts'\?"),
        ({"permisions": None}, r"unknown option 'permisions'; did you mean 'permissions'\?$"),
        ({"executer": "isolated"}, r"unknown option 'executer'; did you mean 'executor'\?$"),
        ({"limts": {}}, r"unknown option 'limts'; did you mean 'limits'\?$"),
        ({"batchs": 5}, r"unknown option 'batchs'; did you mean 'batch'\?$"),
        ({"redacted": len}, r"unknown option 'redacted'; did you mean 'redact'\?$"),
        ({"naem": "x"}, r"unknown option 'naem'; did you mean 'name'\?$"),
        ({"check_argument": True}, r"unknown option 'check_argument'; did you mean 'check_arguments'\?$"),
        ({"allow_unenforce": []}, r"unknown option 'allow_unenforce'; did you mean 'allow_unenforced'\?$"),
        ({"evry": 5}, r"unknown option 'evry'; did you mean 'every'\?$"),
        ({"every": 5, "timezon": "UTC"}, r"unknown option 'timezon'; did you mean 'timezone'\?$"),
        ({"memory": "1 GiB"}, r"unknown option 'memory'; use limits=\{'memory': \.\.\.\}$"),
        ({"net": ["a.example"]}, r"unknown option 'net'; use permissions=Permissions\(net=\.\.\.\)$"),
        ({"interval": 5}, r"unknown option 'interval'; did you mean 'every'\?$"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"priority": "high"}, "priority"),
        ({"timeout": float("nan")}, "timeout"),
        ({"name": ""}, "name"),
        ({"name": "x" * 256}, "name"),
    ],
)
def test_wrong_option_is_rejected_by_the_decorator(options, message):
    with pytest.raises(OptionError, match=message):
        job(**options)(add)
    assert registry.names() == []


def test_default_options_are_read_from_the_settings_lazily(settings):
    decorated = job(priority=3)(add)
    assert decorated.options.job.max_attempts == 3

    settings.DJQUEUE = {**settings.DJQUEUE, "DEFAULTS": {"max_attempts": 8, "priority": 1}}

    assert decorated.options.job.max_attempts == 8
    assert decorated.options.job.priority == 3
    assert decorated.using(max_attempts=2).options.job.max_attempts == 2


def test_backoff_function_belongs_to_the_job_type():
    def patient(failures, error):
        return 10 * failures

    decorated = job(backoff=patient)(add)

    assert decorated.backoff_function is patient
    assert decorated.using(priority=1).backoff_function is patient
    assert isinstance(decorated.options.job.backoff, Backoff)
    with pytest.raises(OptionError, match=r"backoff.*@job"):
        decorated.using(backoff=patient)


def test_backoff_given_to_using_is_stored_with_the_job():
    decorated = job(backoff=lambda failures, error: 10)(add)

    changed = decorated.using(backoff=5)

    assert changed.options.job.backoff == Backoff(kind="fixed", base=5_000, jitter=0.0)
