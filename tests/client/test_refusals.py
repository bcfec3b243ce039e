"""Wrong declarations are rejected with the remedy in the message."""

import pytest

from djqueue import chain, job
from djqueue.client.declarations import declared, registry
from djqueue.errors import ArgumentsError, OptionError


def charge(order_id): ...


def report(region="eu"): ...


@pytest.mark.parametrize("when", [{"every": 5}, {"cron": "@daily"}])
def test_schedule_of_function_with_required_parameter_is_rejected(when):
    with pytest.raises(ArgumentsError, match="missing a required argument: 'order_id'"):
        job(**when)(charge)

    assert registry.find(f"{__name__}.charge") is None


def test_schedule_without_argument_check_accepts_any_signature():
    job_type = job(every=5, check_arguments=False)(charge)

    assert job_type.name in declared.of([job_type.name])


@pytest.mark.parametrize(
    ("given", "message"),
    [({"args": "eu"}, "args: expected a list, got 'eu'"), ({"kwargs": "eu"}, "kwargs: expected a dict")],
)
def test_schedule_requires_args_list_and_kwargs_dict(given, message):
    with pytest.raises(OptionError, match=message):
        job(report).schedule("hourly", cron="@hourly", **given)


def test_error_for_positional_queue_explains_the_keyword():
    with pytest.raises(OptionError, match=r"@job\(queue='emails'\)"):
        job("emails")


@pytest.mark.parametrize("option", [{"cron": "@daily"}, {"every": 5}, {"name": "other"}])
def test_using_rejects_options_of_the_job_type(option):
    with pytest.raises(OptionError, match="set the option on the job type"):
        job(report).using(**option)


def test_job_decorator_rejects_options_of_a_call():
    with pytest.raises(OptionError, match=r"wait: .*\.using\(wait="):
        job(wait=5)(report)


def test_error_for_job_type_in_a_chain_suggests_node():
    job_type = job(report)

    with pytest.raises(OptionError, match=r"use its \.node\("):
        chain(job_type, job_type.node())


def test_error_names_the_misspelled_argument():
    with pytest.raises(ArgumentsError, match="unexpected 'order'"):
        job(charge).enqueue(order=1)
