"""Wrong values and calls known from other libraries are rejected with a suggestion."""

import functools
import operator
from uuid import UUID

import pytest

from djqueue import Queue, chain, chord, flow, group, job
from djqueue.client.queue import EVENTS
from djqueue.conf import READERS
from djqueue.core import suggest
from djqueue.core.errors import JobNameError, UnknownJobError
from djqueue.errors import ArgumentsError, OptionError


def charge(order_id):
    return order_id


class Report:
    def __call__(self, region): ...


@pytest.fixture
def queue():
    return Queue("orders")


@pytest.fixture
def charging():
    return job(name="charge")(charge)


# Functions where a queue expects a payload.


@pytest.mark.parametrize("method", ["enqueue", "enqueue_and_wait"])
def test_error_for_job_type_as_payload_suggests_using(queue, charging, do, method):
    for args, options in [((charging,), {}), ((charging, 42), {}), ((charging,), {"order_id": 42})]:
        with pytest.raises(ArgumentsError, match=r"charge\.using\(queue='orders'\)\.enqueue\(\.\.\.\)"):
            do(queue, method, *args, **options)


def test_error_for_function_as_payload_suggests_the_decorator(queue, do):
    for args, options in [((charge,), {}), ((charge, 42), {}), ((charge,), {"args": (42,)})]:
        with pytest.raises(ArgumentsError, match=r"Put @job on the function, then use charge\.using\("):
            do(queue, "enqueue", *args, **options)
    with pytest.raises(ArgumentsError, match="Put @job on the function"):
        do(queue, "enqueue_many", [1, charge])


def test_error_for_several_payloads_suggests_a_list(queue, do):
    with pytest.raises(
        ArgumentsError, match="takes one payload, got 2: put the values into a list or a dict"
    ):
        do(queue, "enqueue", "shop.jobs.charge", 42)


def test_error_for_job_type_as_name_suggests_using(queue, charging, do):
    with pytest.raises(OptionError, match=r"name: expected the name of a job.*charge\.using\("):
        do(queue, "enqueue", 1, name=charging)
    with pytest.raises(OptionError, match=r"name: expected the name of a job"):
        queue.node(1, name=charging)


def test_enqueue_many_rejects_a_single_value(queue, do):
    for wrong in (5, "abc", b"abc", {"a": 1}):
        with pytest.raises(OptionError, match=r"payloads: expected a list .* to enqueue one job"):
            do(queue, "enqueue_many", wrong)


def test_payload_not_accepted_by_the_named_function_is_rejected(queue, charging, do):
    for wrong in (1, {"args": [1]}, {"args": "a", "kwargs": {}}):
        with pytest.raises(ArgumentsError, match=r'payload must be \{"args": \[\.\.\.\]'):
            do(queue, "enqueue", wrong, name="charge")
    with pytest.raises(ArgumentsError, match="missing a required argument: 'order_id'"):
        do(queue, "enqueue_many", [{"args": [], "kwargs": {}}], name="charge")

    assert queue.enqueue({"args": [1], "kwargs": {}}, name="charge").status == "queued"


def test_payload_for_function_without_argument_check_can_be_anything(queue, do):
    job(name="elsewhere", check_arguments=False)(charge)

    assert do(queue, "enqueue", 1, name="elsewhere").status == "queued"


# Ids.


@pytest.mark.parametrize(
    "method", ["get_job", "get_status", "get_result", "cancel", "promote", "retry", "remove", "get_states"]
)
def test_invalid_job_id_is_rejected(queue, do, method):
    result = queue.enqueue(1)
    uuid = UUID(result.id)

    for wrong, hint in [
        (result, "pass its .id"),
        (queue.get_job(result.id), "pass its .id"),
        (uuid, r"pass str\("),
    ]:
        with pytest.raises(OptionError, match=rf"ids?: expected a job's id \(a string\), got .*{hint}"):
            do(queue, method, wrong)
    for wrong in (None, 5):
        with pytest.raises(OptionError, match=r"expected a job's id \(a string\), got an object of type"):
            do(queue, method, wrong)


def test_update_and_reschedule_reject_invalid_job_ids(queue, do):
    with pytest.raises(OptionError, match=r"expected a job's id"):
        do(queue, "update", 5, priority=1)
    with pytest.raises(OptionError, match=r"expected a job's id"):
        do(queue, "update", 5, payload=1)
    with pytest.raises(OptionError, match=r"expected a job's id"):
        do(queue, "reschedule", 5, delay=1)


def test_get_states_accepts_a_single_id(queue, do):
    result = queue.enqueue(1)

    assert do(queue, "get_states", result.id) == {result.id: "waiting"}


@pytest.mark.parametrize(
    ("event", "meant"),
    [
        ("active", "started"),
        ("waiting", "enqueued"),
        ("task-succeeded", "completed"),
        ("error", "failed"),
        ("snoozed", "released"),
        ("complet", "completed"),
    ],
)
def test_events_of_other_libraries_suggest_the_djqueue_event(queue, event, meant):
    with pytest.raises(OptionError, match=f"unknown event '{event}'; did you mean '{meant}'"):
        queue.on(event, print)


def test_suggested_events_exist():
    assert set(suggest.FOREIGN_EVENTS.values()) <= set(EVENTS)
    assert set(suggest.FOREIGN_EVENTS).isdisjoint(EVENTS)


def test_event_handler_must_be_callable(queue):
    with pytest.raises(OptionError, match="handler: expected a function"):
        queue.on("completed", 5)


# What @job is put on.


@pytest.mark.parametrize("options", [{}, {"name": "report"}], ids=["plain", "named"])
def test_class_is_rejected_as_job(options):
    with pytest.raises(JobNameError, match=r"Report is a class: apply @job"):
        job(**options)(Report)


def test_builtin_is_rejected_as_job():
    for builtin in (print, operator.add, len):
        with pytest.raises(
            JobNameError, match=r"is a builtin: apply @job to a module-level function that calls the builtin"
        ):
            job(builtin)


def test_job_type_is_rejected_as_job():
    charging = job(name="charge")(charge)

    for options in ({}, {"name": "other"}):
        with pytest.raises(JobNameError, match=r"<job charge> is already a job: apply @job only once"):
            job(**options)(charging)


@pytest.mark.parametrize("value", [5, ["a"], object()], ids=["number", "list", "object"])
def test_object_that_is_not_callable_is_rejected_as_job(value):
    with pytest.raises(JobNameError, match="is not a function"):
        job(value)


def test_callable_object_without_name_is_rejected_as_job():
    for value in (Report(), functools.partial(charge, 1)):
        with pytest.raises(JobNameError, match="pass name= to @job"):
            job(value)
        assert job(name=f"named {type(value).__name__}")(value)


# Attributes and options of other job queues.


@pytest.mark.parametrize(
    ("attribute", "call"),
    [
        ("enqueue_in", r"Queue\.enqueue\(payload, delay=60\)"),
        ("enqueue_at", r"Queue\.enqueue\(payload, run_at="),
        ("fetch_job", r"Queue\.get_job\(id\)"),
        ("count", r"Queue\.counts\(\)"),
        ("empty", r"Queue\.clear\(\)"),
        ("delete", r"Queue\.obliterate\(\)"),
        ("add", r"Queue\.enqueue\(payload\)"),
        ("delay", r"Queue\.enqueue\(payload\)"),
        ("failed_job_registry", r"Queue\.dead_letters\(\)"),
        ("scheduled_job_registry", r"Queue\.counts\(\)"),
    ],
)
def test_queue_attributes_of_other_libraries_suggest_the_djqueue_method(queue, attribute, call):
    with pytest.raises(AttributeError, match=call):
        getattr(queue, attribute)
    assert not hasattr(queue, attribute)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = queue.nonsense


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("bind", r"current_job\(\)"),
        ("autoretry_for", "every exception is retried"),
        ("rate_limit", r"DJQUEUE\['QUEUES'\]"),
        ("ignore_result", "result_ttl"),
        ("acks_late", "leases"),
        ("on_success", "signals"),
    ],
)
def test_decorator_options_of_other_libraries_are_explained(option, hint):
    with pytest.raises(OptionError, match=f"unknown option '{option}'.*{hint}"):
        job(**{option: True})(charge)


@pytest.mark.parametrize("option", ["seconds", "minutes", "hours", "interval", "crontab", "run_every"])
def test_scheduler_options_of_other_libraries_are_explained(charging, option):
    with pytest.raises(OptionError, match=f"unknown option '{option}'; did you mean '(every|cron)'"):
        charging.schedule("daily", args=[1], **{option: 5})


def test_error_for_positional_options_suggests_keywords(charging, queue):
    for wrong in ("emails", queue, {"queue": "emails"}):
        with pytest.raises(OptionError, match=r"using: expected keyword arguments, such as using\(queue="):
            charging.using(wrong)


# Workflows.


def test_error_for_list_of_nodes_suggests_unpacking(queue):
    for make in (flow, chain, group):
        for wrong in ([queue.node(1)], (queue.node(n) for n in range(2))):
            with pytest.raises(
                OptionError, match=rf"{make.__name__}: .*: unpack it: {make.__name__}\(\*nodes\)"
            ):
                make(wrong)
    with pytest.raises(OptionError, match=r"after: .*: unpack it: after\(\*nodes\)"):
        queue.node(1).after([queue.node(2)])


def test_chord_requires_a_list_of_nodes(queue):
    with pytest.raises(OptionError, match=r"chord: expected a list of nodes"):
        chord(queue.node(1), then=queue.node(2))


def test_error_for_enqueue_result_in_a_flow_suggests_node(charging, queue):
    with pytest.raises(OptionError, match=r"use \.node\(\.\.\.\) instead of \.enqueue\(\.\.\.\)"):
        chain(queue.enqueue(1), queue.node(1))
    with pytest.raises(OptionError, match=r"after: expected a node, .* got <job charge>: use its \.node\("):
        queue.node(1).after(charging)


def test_flow_result_suggests_the_node_name(queue):
    result = flow(fetch=queue.node(1), store=queue.node(2)).enqueue()

    with pytest.raises(KeyError, match="no job of the workflow is named 'fetchh'; did you mean 'fetch'"):
        result["fetchh"]
    with pytest.raises(KeyError, match="is not a node of the workflow"):
        result[queue.node(3)]


def test_unknown_job_name_suggests_a_registered_name(charging):
    from djqueue.client import registry

    with pytest.raises(
        UnknownJobError, match=r"registered as 'chrage'; did you mean 'charge'\? If not, import"
    ):
        registry.get("chrage")


@pytest.mark.parametrize(
    ("attribute", "call"),
    [
        ("get", r"result\.wait\(timeout\)"),
        ("ready", r"result\.job\(\)\.state"),
        ("state", r"result\.job\(\)\.state"),
        ("cancel", r"Queue\(result\.queue\)\.cancel\(result\.id\)"),
    ],
)
def test_result_attributes_of_other_libraries_suggest_the_djqueue_method(queue, attribute, call):
    result = queue.enqueue(1)

    with pytest.raises(AttributeError, match=call):
        getattr(result, attribute)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = result.nonsense


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("task", "job"),
        ("shared_task", "job"),
        ("crontab", r"job\(cron="),
        ("OptionError", r"errors\.OptionError"),
    ],
)
def test_names_that_are_not_in_the_package_suggest_the_djqueue_name(name, here):
    import djqueue

    with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use djqueue\.{here}"):
        getattr(djqueue, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = djqueue.nonsense


# Waiting, and async code.


def test_timeout_of_a_wait_suggests_wait(charging, do):
    with pytest.raises(ArgumentsError, match=r"pass wait=5; .* use charge\.using\(timeout=5\)"):
        do(charging, "enqueue_and_wait", 42, timeout=5)


def test_function_with_a_timeout_gets_it(queue, djqueue_immediate):
    @job(name="fetch")
    def fetch(timeout):
        return timeout

    assert fetch.enqueue_and_wait(timeout=5) == 5


@pytest.mark.parametrize(
    ("attribute", "call"),
    [
        ("delay", r"charge\.enqueue\("),
        ("kiq", r"charge\.enqueue\("),
        ("kicker", r"charge\.using\("),
        ("send_with_options", r"charge\.using\("),
        ("call_local", r"charge\("),
        ("retry", r"djqueue\.Retry\("),
    ],
)
def test_task_attributes_of_other_libraries_suggest_the_djqueue_call(charging, attribute, call):
    with pytest.raises(AttributeError, match=call):
        getattr(charging, attribute)


def test_suggested_settings_exist():
    assert set(suggest.FOREIGN_SETTINGS.values()) | set(suggest.SETTING_NOTES) <= set(READERS)
    assert (set(suggest.FOREIGN_SETTINGS) | set(suggest.EXPLAINED_SETTINGS)).isdisjoint(READERS)
