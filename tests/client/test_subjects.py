"""Subjects: how objects are named, and how their jobs are found."""

from types import SimpleNamespace
from uuid import UUID

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session
from django.utils.functional import SimpleLazyObject
from hypothesis import given
from hypothesis import strategies as st

from djqueue import Queue, flow, job
from djqueue.core.options import EnqueueOptions, JobOptions, check_text, parse_options, parts_of
from djqueue.errors import OptionError
from djqueue.storage.redis import records
from djqueue.storage.tables.rows import pack_options, unpack_options


class Reader(User):
    """A proxy."""

    class Meta:
        app_label = "auth"
        proxy = True


def saved(model, **fields):
    """An instance as one that was read."""
    return model.from_db("default", list(fields), list(fields.values()))


USER = {"id": 7, "username": "ada"}


def subject_of(value):
    return parse_options({"subject": value}, EnqueueOptions()).job.subject


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (saved(User, **USER), "auth.user:7"),
        (saved(Reader, **USER), "auth.user:7"),
        (SimpleLazyObject(lambda: saved(User, **USER)), "auth.user:7"),
        (saved(Session, session_key="a:b/c"), "sessions.session:a:b/c"),
        (saved(Group, id=UUID(int=5), name="g"), f"auth.group:{UUID(int=5)}"),
    ],
)
def test_subject_of_instance_has_model_and_primary_key(instance, expected):
    assert subject_of(instance) == expected


@pytest.mark.parametrize("instance", [User(username="ada"), Session(session_key="made-by-hand")])
def test_subject_of_unsaved_instance_is_rejected(instance):
    with pytest.raises(OptionError, match=r"^subject: <.*> has no primary key"):
        subject_of(instance)


def test_subject_of_instance_with_too_long_key_is_rejected():
    with pytest.raises(OptionError, match=r"^subject: must have 1 to 255 characters; got 270$"):
        subject_of(saved(Session, session_key="k" * (270 - len("sessions.session:"))))


def test_model_class_is_rejected_as_subject():
    with pytest.raises(OptionError, match=r"^subject: expected a model instance or a string, got <class"):
        subject_of(User)


def test_every_enqueue_method_accepts_a_subject(storage):
    user = saved(User, **USER)

    @job(name="greet", subject="greetings")
    def greet():
        pass

    queue = Queue("work")
    results = [
        greet.using(subject=user).enqueue(),
        *greet.using(subject=user).enqueue_many([((), {})] * 2),
        queue.enqueue(1, name="x", subject=user),
        *queue.enqueue_many([1, 2], name="x", subject="auth.user:7"),
        *flow(queue.node(1, name="x", subject=user)).enqueue(),
    ]
    greet.enqueue()

    assert {one.id for one in storage.reads.jobs_about("auth.user:7", 99).jobs} == {one.id for one in results}
    assert [one.name for one in storage.reads.jobs_about("greetings", 99).jobs] == ["greet"]


def test_get_job_returns_the_subject():
    queue = Queue("work")
    result = queue.enqueue(1, name="x", subject="shop.order:7")
    plain = queue.enqueue(1, name="x")

    assert queue.get_job(result.id).subject == "shop.order:7"
    assert queue.get_job(plain.id).subject is None


TEXTS = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=255
)


@given(TEXTS)
def test_any_text_is_stored_unchanged_as_subject(text):
    assert subject_of(text) == check_text("subject", text) == text
    options = JobOptions(subject=text)
    assert unpack_options(pack_options(options)) == options
    assert records.unpack_options(records.pack_options(options)) == options


@given(TEXTS)
def test_any_text_is_parsed_as_instance_subject_or_not(text):
    parts = parts_of(text)

    assert parts is None or "{}.{}:{}".format(*parts) == text


@given(st.integers() | st.uuids() | TEXTS.filter(lambda text: len(text) < 200))
def test_subject_of_instance_can_be_parsed(key):
    meta = SimpleNamespace(label_lower="shop.order")
    meta.concrete_model = SimpleNamespace(_meta=meta)
    instance = SimpleNamespace(pk=key, _meta=meta, _state=SimpleNamespace(adding=False))

    assert parts_of(subject_of(instance)) == ("shop", "order", str(key))
