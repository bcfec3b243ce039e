"""Wrong arguments are rejected by the call, with a suggestion."""

import pytest

import djqueue
from djqueue import JobType, Queue, job
from djqueue.core.errors import DjqueueError, JobNameError
from djqueue.errors import ArgumentsError, OptionError


def pay(order_id, *, twice=False):
    return order_id


def collect(*parts, sep="", **extra):
    return sep.join(parts)


def poll(url, wait=5):
    return [url, wait]


def numbers(count, on_restart="again"):
    yield from range(count)


def take_all(jobs):
    return [job.args for job in jobs]


@pytest.fixture
def paying():
    return job(queue="orders")(pay)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'order_id'"),
        ((1, 2), {}, "too many positional arguments"),
        ((1,), {"twcie": True}, "unexpected keyword argument 'twcie'"),
        ((1,), {"order_id": 2}, "multiple values for argument 'order_id'"),
    ],
)
@pytest.mark.parametrize("call", ["enqueue", "enqueue_and_wait"])
def test_arguments_not_accepted_by_the_function_are_rejected(paying, do, call, args, kwargs, message):
    with pytest.raises(ArgumentsError, match=message) as refused:
        do(paying, call, *args, **kwargs)

    assert "tests.client.test_arguments.pay(order_id, *, twice=False)" in str(refused.value)
    assert isinstance(refused.value, TypeError)
    assert isinstance(refused.value, DjqueueError)
    assert Queue("orders").counts()["waiting"] == 0


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((1,), {"twice": True}), ((), {"order_id": 1})], ids=str
)
def test_arguments_accepted_by_the_function_are_stored(paying, do, args, kwargs):
    answer = do(paying, "enqueue", *args, **kwargs)

    assert Queue("orders").get_job(answer.id).payload == {"args": list(args), "kwargs": kwargs}


def test_function_with_variable_arguments_accepts_any_arguments(do):
    collecting = job(collect)

    assert do(collecting, "enqueue", "a", "b", "c", sep="-", other=1).status == "queued"
    assert do(collecting, "enqueue").status == "queued"


def test_required_keyword_only_arguments_cannot_be_omitted(do):
    def ship(order, *, to):
        return to

    shipping = job(name="ship")(ship)
    with pytest.raises(ArgumentsError, match=r"missing a required .*'to'"):
        do(shipping, "enqueue", 1)
    assert do(shipping, "enqueue", 1, to="Rome").status == "queued"


@pytest.mark.parametrize("option", ["delay", "priority", "queue"])
def test_error_for_option_among_arguments_suggests_using(paying, option):
    with pytest.raises(ArgumentsError, match=rf"pay\.using\({option}=\.\.\.\)\.enqueue"):
        paying.enqueue(1, **{option: 1})


def test_option_of_another_library_among_arguments_is_translated(paying):
    with pytest.raises(ArgumentsError, match=r"pay\.using\(delay=\.\.\.\)\.enqueue"):
        paying.enqueue(1, countdown=60)


def test_wrong_call_among_many_is_named_and_nothing_is_stored(paying, do):
    with pytest.raises(ArgumentsError, match=r"entry 2: .*missing a required argument"):
        do(paying, "enqueue_many", [((1,), {}), ((2,), {}), ((), {})])

    assert Queue("orders").counts()["waiting"] == 0


@pytest.mark.parametrize(
    "entry", [1, "ab", (1, 2), ((1,),), ("ab", {}), ((1,), {}, {}), {"order_id": 1}], ids=str
)
def test_enqueue_many_explains_the_format_of_an_entry(paying, do, entry):
    explained = r"entry 1 is .*expected a pair \(args, kwargs\) such as \(\(42,\), \{\}\)"
    with pytest.raises(ArgumentsError, match=explained):
        do(paying, "enqueue_many", [((1,), {}), entry])

    assert Queue("orders").counts()["waiting"] == 0


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("secret" * 10_000, "of type str"),
        ({"password": "secret"}, "of type dict"),
        (("secret",) * 5, r"a tuple of 5 items \(str, str, str, \.\.\.\)"),
    ],
    ids=["text", "dict", "tuple"],
)
def test_wrong_entry_is_described_without_its_values(paying, entry, kind):
    with pytest.raises(ArgumentsError, match=f"entry 0 is {kind}; expected") as refused:
        paying.enqueue_many([entry])

    assert "secret" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_position_of_a_wrong_entry_counts_from_the_first_chunk(paying):
    with pytest.raises(ArgumentsError, match="entry 1500 is of type int"):
        paying.enqueue_many([*[((1,), {})] * 1_500, 7])


def test_argument_check_can_be_disabled_for_a_job_type(do):
    elsewhere = job(name="elsewhere", check_arguments=False)(pay)

    assert do(elsewhere, "enqueue", 1, 2, 3).status == "queued"
    assert do(elsewhere.using(delay=5), "enqueue", 1, 2, 3).status == "queued"
    assert elsewhere.enqueue_many([((), {"any": 1})])[0].status == "queued"


def test_argument_check_can_be_disabled_for_one_call(paying, do):
    assert do(paying.using(check_arguments=False), "enqueue", 1, 2, 3).status == "queued"
    with pytest.raises(ArgumentsError):
        do(paying, "enqueue", 1, 2, 3)


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_check_arguments_must_be_a_bool(paying, value):
    with pytest.raises(OptionError, match="check_arguments"):
        job(check_arguments=value)(pay)
    with pytest.raises(OptionError, match="check_arguments"):
        paying.using(check_arguments=value)


def test_arguments_of_batch_jobs_are_not_checked(do):
    batched = job(batch=10)(take_all)

    assert do(batched, "enqueue", 1, 2, three=3).status == "queued"


def test_arguments_of_nodes_and_schedules_are_checked(paying):
    with pytest.raises(ArgumentsError, match="order_id"):
        paying.node()
    with pytest.raises(ArgumentsError, match="too many"):
        paying.schedule("nightly", every=60, args=[1, 2])


def test_function_without_signature_is_not_checked(do):
    assert do(job(name="make")(max), "enqueue", 1, 2).status == "queued"


# A `wait` of the function's own.


def test_ambiguous_wait_argument_is_rejected(do):
    polling = job(poll)

    with pytest.raises(ArgumentsError, match=r"wait=1 is ambiguous: .*using\(wait=\.\.\.\)"):
        do(polling, "enqueue_and_wait", "a", wait=1)


def test_wait_can_be_given_to_the_caller_and_the_function(do, djqueue_drain, monkeypatch):
    waited = []

    def record(storage, batch, wait, on_commit=None):
        waited.append((batch.payloads, wait))

    async def arecord(storage, batch, wait, on_commit=None):
        record(storage, batch, wait)

    monkeypatch.setattr("djqueue.client.results.enqueue_and_wait", record)
    monkeypatch.setattr("djqueue.client.results.aenqueue_and_wait", arecord)
    polling = job(poll)

    do(polling.using(wait=10), "enqueue_and_wait", "a", wait=1)
    do(polling, "enqueue_and_wait", "a", 1)
    do(job(pay).using(timeout=30), "enqueue_and_wait", 42, wait=10)
    do(job(pay).using(wait=20), "enqueue_and_wait", 42)
    do(job(pay).using(wait=20), "enqueue_and_wait", 42, wait=10)

    assert [wait for _, wait in waited] == [10, 30.0, 10, 20, 10]
    [first] = waited[0][0]
    assert b"kwargs" in first
    assert b"\xa4wait\x01" in first


def test_using_rejects_invalid_wait(paying):
    with pytest.raises(OptionError, match="wait"):
        paying.using(wait=-1)


def test_on_restart_can_be_given_to_the_stream_and_the_function():
    counting = job(numbers)

    with pytest.raises(ArgumentsError, match=r"on_restart='x' is ambiguous: .*using\(on_restart=\.\.\.\)"):
        counting.enqueue_and_stream(3, on_restart="x")
    assert counting.using(on_restart="continue").enqueue_and_stream(3, on_restart="x")


# Functions that no worker would find.


def test_lambda_requires_a_job_name():
    with pytest.raises(JobNameError, match="lambda"):
        job(lambda: 1)
    assert isinstance(job(name="one")(lambda: 1), JobType)


def test_nested_function_requires_a_job_name():
    def inner():
        return 1

    with pytest.raises(JobNameError, match=r"inner is defined inside a function.*name="):
        job(inner)
    assert isinstance(job(name="inner")(inner), JobType)


class Shop:
    def method(self, order):
        return order

    @classmethod
    def of_class(cls, order):
        return order

    @staticmethod
    def static(order):
        return order


@pytest.mark.parametrize(
    "function",
    [Shop.method, Shop().method, Shop.of_class, Shop.static, Shop.__dict__["static"]],
    ids=["method", "bound method", "class method", "static method", "static method's descriptor"],
)
@pytest.mark.parametrize("name", [None, "shop"])
def test_method_cannot_be_a_job(function, name):
    with pytest.raises(JobNameError, match="is a method: apply @job to a module-level function"):
        job(name=name)(function)


def test_callable_object_requires_a_job_name():
    class Adder:
        def __call__(self, one):
            return one + 1

    with pytest.raises(JobNameError, match="name="):
        job(Adder())
    assert job(name="adder")(Adder())(1) == 2


# Calls of other job queues.


@pytest.mark.parametrize(
    ("call", "here"),
    [
        ("delay", r"pay\.enqueue\("),
        ("apply_async", r"pay\.using\(delay=60, queue=\.\.\.\)\.enqueue\("),
        ("send", r"pay\.enqueue\("),
        ("send_with_options", r"pay\.using\("),
        ("defer", r"pay\.enqueue\("),
        ("s", r"pay\.node\("),
    ],
)
def test_methods_of_other_libraries_suggest_the_djqueue_method(paying, call, here):
    with pytest.raises(AttributeError, match=rf"A djqueue job has no {call}\(\)\. Use {here}"):
        getattr(paying, call)
    assert not hasattr(paying, call)


def test_unknown_attribute_raises_a_plain_attribute_error(paying):
    with pytest.raises(AttributeError, match="'JobType' object has no attribute 'colour'"):
        _ = paying.colour


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("cached", "result_ttl"),
        ("cluster", "queue"),
        ("countdown", "delay"),
        ("eta", "run_at"),
        ("expires", "ttl"),
        ("group", "concurrency_key"),
        ("job_timeout", "timeout"),
        ("max_retries", "max_attempts"),
        ("queue_name", "queue"),
        ("retries", "max_attempts"),
        ("retry", "max_attempts"),
        ("retry_backoff_max", "backoff"),
        ("time_limit", "timeout"),
    ],
)
def test_options_of_other_libraries_are_translated(paying, option, here):
    for refuse in (
        lambda: paying.using(**{option: 1}),
        lambda: job(**{option: 1})(pay),
        lambda: Queue("orders").enqueue(1, **{option: 1}),
    ):
        with pytest.raises(OptionError, match=rf"unknown option '{option}'; did you mean '{here}'\?"):
            refuse()


@pytest.mark.parametrize(
    ("option", "explained"),
    [
        ("ack_failure", "max_attempts=1"),
        ("exchange", "use queue"),
        ("failure_ttl", "'DEAD_LETTERS'"),
        ("is_async", "IMMEDIATE"),
        ("meta", "use headers"),
        ("on_stopped", "job_cancelled"),
        ("q_options", r"using\(\)"),
        ("reject_on_worker_lost", "max_stalls"),
        ("repeat", "max_executions=3"),
        ("sync", "IMMEDIATE"),
        ("task_name", "tags or subject"),
    ],
)
def test_options_of_other_libraries_without_equivalent_are_explained(paying, option, explained):
    for refuse in (lambda: paying.using(**{option: 1}), lambda: job(**{option: 1})(pay)):
        with pytest.raises(OptionError, match=rf"unknown option '{option}'; .*{explained}"):
            refuse()


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("next_run", "start_at"),
        ("one_off", "max_executions"),
        ("repeats", "max_executions"),
        ("start_time", "start_at"),
    ],
)
def test_schedule_options_of_other_libraries_are_translated(option, here):
    with pytest.raises(OptionError, match=rf"unknown option '{option}'; did you mean '{here}'\?"):
        job(every=60, **{option: 1})(pay)
    with pytest.raises(OptionError, match=rf"unknown option '{option}'; did you mean '{here}'\?"):
        job(name="scheduled")(pay).schedule("one", every=60, **{option: 1})


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("async_chain", "djqueue.chain"),
        ("async_iter", "djqueue.chord"),
        ("current_task", "djqueue.current_job"),
        ("Schedule", r"djqueue.job\(cron="),
        ("result", r"Queue\(name\).get_result\(id\)"),
    ],
)
def test_exports_of_other_libraries_are_translated(name, here):
    with pytest.raises(AttributeError, match=here):
        getattr(djqueue, name)


@pytest.mark.parametrize(
    ("attribute", "here"),
    [
        ("exc_info", r"result.job\(\).timeline"),
        ("is_failed", r"result.job\(\).state"),
        ("latest_result", r"result.wait\(timeout\)"),
    ],
)
def test_result_attributes_of_other_libraries_are_translated(paying, attribute, here):
    with pytest.raises(AttributeError, match=here):
        getattr(paying.enqueue(1), attribute)


def test_error_for_retries_explains_how_max_attempts_counts(paying):
    with pytest.raises(OptionError, match="max_attempts counts the first attempt, too"):
        paying.using(retries=3)
