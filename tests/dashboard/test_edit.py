"""Editing arguments: concurrent edits are rejected, input is kept, and secrets stay hidden."""

import html
import re

import pytest

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.codecs import MSGPACK, encode
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Batch, ClaimRequest, JobFailure, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.dashboard import rights
from djqueue.dashboard.views import editing
from djqueue.models import AuditEvent, PayloadVersion, Revision
from tests.dashboard.visiting import PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
SECRET = {"to": "ann", "password": "hunter2"}
EDITOR = (rights.VIEW, rights.EDIT)


@job(name="tests.edit.mail", queue="emails")
def mail(to, text="", *, password=None):
    """Registered, so that its arguments can be checked."""


def last_digits(value, part):
    """A payload as the job itself would have it shown: a card's last digits, a note unless it is public."""
    kwargs = dict(value["kwargs"])
    if "number" in kwargs:
        kwargs["number"] = f"…{kwargs['number'][-4:]}"
    if kwargs.get("kind") != "public" and "note" in kwargs:
        kwargs["note"] = "(a note)"
    return {"args": value["args"], "kwargs": kwargs}


@job(name="tests.edit.pay", queue="emails", redact=last_digits)
def pay(**said):
    """A job that says itself what of its values is shown."""


@job(name="tests.edit.broken", queue="emails", redact=lambda value, part: 1 / 0)
def broken(*said):
    """One whose function fails: nothing of it is shown."""


@pytest.fixture
def queue():
    return Queue("emails")


@pytest.fixture
def client():
    return logged_in(one_with(*EDITOR, rights.RETRY, rights.ENQUEUE))


def enqueue(queue, *args, **kwargs):
    queue.enqueue({"args": list(args), "kwargs": kwargs}, id="job-1", name="tests.edit.mail")


def claim():
    names = frozenset({"tests.edit.mail", "emails"})
    return get_storage().claim(ClaimRequest("w1", 1, names, ("emails",))).jobs


def end(kind="fail"):
    [claimed] = claim()
    error = JobFailure("shop.NoAddressError", "no address", "") if kind == "fail" else None
    reason = "explicit_fail" if kind == "fail" else ""
    get_storage().finish([Outcome("emails", "job-1", claimed.token, kind, None, 0, error, reason)])


def opened(client):
    """The fields of the form as a browser has them."""
    text = client.get(address(BY_NAME["edit"])).content.decode()
    found = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)" id="id_', text):
        found[name] = html.unescape(value)
    for name, value in re.findall(r'<textarea name="(\w+)"[^>]*>\n?(.*?)</textarea>', text, re.DOTALL):
        found[name] = html.unescape(value)
    assert {"seal", "how", "new_id"} <= found.keys(), text
    return found


def send(client, **form):
    return client.post(address(BY_NAME["edit_now"]), form, follow=True)


def said(response):
    return html.unescape(response.content.decode())


def payload(job_id="job-1"):
    return Queue("emails").get_job(job_id).payload


def test_pending_job_gets_new_arguments_and_the_old_payload_is_kept(queue, client):
    enqueue(queue, "ann", text="hello")
    form = opened(client)
    assert form["how"] == "update"
    response = send(client, **{**form, "args": '["bob"]'})
    assert "Arguments changed" in said(response)
    assert payload() == {"args": ["bob"], "kwargs": {"text": "hello"}}
    assert queue.get_job("job-1").state is State.WAITING
    assert "Changed by" in said(response)
    assert "['ann']" in said(response)
    event = AuditEvent.objects.get()
    assert (event.action, event.job_id, event.detail["how"]) == ("edit_now", "job-1", "updated")
    assert "bob" not in str(event.detail)


def test_failed_job_is_retried_only_with_the_new_arguments(queue, client):
    enqueue(queue, "ann")
    end()
    form = opened(client)
    assert form["how"] == "retry"
    response = send(client, **{**form, "args": '["bob"]'})
    assert "The job will be retried with the new arguments" in said(response)
    [claimed] = claim()
    assert b"bob" in claimed.payload
    assert PayloadVersion.objects.get().outcome == Revision.RETRIED
    assert b"ann" in bytes(PayloadVersion.objects.get().payload)


def test_job_rejected_by_bulk_write_runs_only_with_changed_arguments(queue, client):
    error = ("djqueue.core.errors.OptionError", "priority: 'high' is not a number")
    given = encode({"args": ["ann"], "kwargs": {}}, MSGPACK)
    options = JobOptions(rejected=error)
    get_storage().enqueue([Batch("emails", "tests.edit.mail", options, [given], ["job-1"])])
    page = said(client.get(address(BY_NAME["job"])))
    assert "rejected by a bulk write" in page
    assert error[1] in page

    assert "rejected arguments" in said(client.post(address(BY_NAME["retry"]), follow=True))
    assert claim() == []
    send(client, **{**opened(client), "args": '["bob"]'})
    [claimed] = claim()
    assert b"bob" in claimed.payload
    get_storage().finish([Outcome("emails", "job-1", claimed.token, "complete")])

    send(client, **{**opened(client), "args": '["cid"]'})
    [copied] = claim()
    assert b"cid" in copied.payload, "a job that is made from it is a dead letter"


@pytest.mark.parametrize("ended", ["complete", "cancel"])
def test_edit_of_finished_job_enqueues_a_new_job_with_links_both_ways(queue, client, ended):
    queue.enqueue(
        {"args": ["ann"], "kwargs": {}}, id="job-1", name="tests.edit.mail", priority=3, tags=["vip"]
    )
    end(ended)
    before = queue.get_job("job-1").state
    form = opened(client)
    assert form["how"] == "copy"
    response = send(client, **{**form, "args": '["bob"]'})
    version = PayloadVersion.objects.get()
    made = queue.get_job(version.copy_id)
    assert (made.payload["args"], made.state, made.record.options.priority) == (["bob"], State.WAITING, 3)
    assert made.record.options.tags == ("vip",)
    assert queue.get_job("job-1").state is before
    assert payload() == {"args": ["ann"], "kwargs": {}}
    assert response.redirect_chain[-1][0].endswith(f"/{version.copy_id}/")
    assert address(BY_NAME["job"]) in said(response), "no link to the job that it was made from"
    assert version.copy_id in said(client.get(address(BY_NAME["job"]))), "no link to the new job"

    assert "was already enqueued" in said(send(client, **{**form, "args": '["bob"]'}))
    assert len(get_storage().reads.page("emails", None, 10)) == 2
    assert PayloadVersion.objects.count() == 1


def test_second_of_two_concurrent_edits_is_rejected_and_keeps_its_input(queue, client):
    enqueue(queue, "ann")
    other = logged_in(one_with(*EDITOR, rights.RETRY, rights.ENQUEUE))
    first, second = opened(client), opened(other)
    send(client, **{**first, "args": '["bob"]'})
    response = send(other, **{**second, "args": '["eve"]'})
    assert "have changed since this form was opened. Arguments edited by" in said(response)
    assert '["eve"]' in said(response)
    assert '"bob"' in said(response)
    assert payload()["args"] == ["bob"]
    assert PayloadVersion.objects.count() == 1

    again = {**second, **dict(re.findall(r'name="(seal|new_id)" value="([^"]*)"', said(response)))}
    send(other, **{**again, "args": '["eve"]'})
    assert payload()["args"] == ["eve"]


def test_edit_of_job_claimed_meanwhile_is_rejected_and_keeps_its_input(queue, client):
    enqueue(queue, "ann")
    form = opened(client)
    [claimed] = claim()
    response = send(client, **{**form, "args": '["bob"]'})
    assert "Not saved: the job is now active" in said(response)
    assert "Arguments of an active job" in said(response)
    assert '["bob"]' in said(response)
    assert b"ann" in claimed.payload
    assert not PayloadVersion.objects.exists()


def test_edit_of_job_claimed_during_the_request_is_rejected(queue, client, monkeypatch):
    enqueue(queue, "ann")
    form = opened(client)
    storage = get_storage()
    replace_payload = storage.jobs.replace_payload
    monkeypatch.setattr(
        storage.jobs, "replace_payload", lambda *said, **how: (claim(), replace_payload(*said, **how))[1]
    )
    response = send(client, **{**form, "args": '["bob"]'})
    assert "Not saved: the job is now" in said(response)
    assert payload()["args"] == ["ann"]
    assert not PayloadVersion.objects.exists()


def test_edit_of_job_retried_meanwhile_names_the_user_who_retried_it(queue, client):
    enqueue(queue, "ann")
    end()
    form = opened(client)
    client.post(address(BY_NAME["retry"]))
    response = send(client, **{**form, "args": '["bob"]'})
    assert "now waiting. Already retried by" in said(response)
    assert payload()["args"] == ["ann"]


def test_missing_job_is_not_found(queue, client):
    enqueue(queue, "ann")
    form = opened(client)
    queue.remove("job-1")
    response = send(client, **form)
    assert response.status_code == 404
    assert "Job job-1 was not found" in said(response)


def test_arguments_that_the_function_does_not_accept_are_rejected(queue, client):
    enqueue(queue, "ann")
    response = send(client, **{**opened(client), "kwargs": '{"cc": 1}'})
    assert "does not accept these arguments" in said(response)
    assert payload()["args"] == ["ann"]
    for broken in ("{", '{"a": 1, "a": 2}', "5"):
        response = send(client, **{**opened(client), "args": broken})
        assert 'class="errorlist"' in said(response), broken
    assert not PayloadVersion.objects.exists()


def test_secret_is_not_in_the_form_and_is_kept_if_left_unchanged(queue, client):
    enqueue(queue, "ann", password="hunter2")
    assert "hunter2" not in said(client.get(address(BY_NAME["edit"])))
    send(client, **{**opened(client), "args": '["bob"]'})
    assert payload() == {"args": ["bob"], "kwargs": {"password": "hunter2"}}
    response = send(client, **{**opened(client), "kwargs": '{"text": "•••1"}'})
    assert "stands for a hidden value only in its original place" in said(response)
    send(client, **{**opened(client), "kwargs": '{"password": "new"}'})
    response = client.get(address(BY_NAME["job"]))
    assert payload()["kwargs"] == {"password": "new"}
    assert "hunter2" not in said(response)
    keeper = logged_in(one_with(rights.VIEW, rights.VIEW_PAYLOAD))
    assert "hunter2" in said(keeper.post(address(BY_NAME["reveal"])))


def test_value_hidden_by_redact_function_is_kept_if_left_unchanged(queue, client):
    given = {"number": "4111111111111111", "note": "he is ill", "amount": 5}
    queue.enqueue({"args": [], "kwargs": given}, id="job-1", name="tests.edit.pay")
    form = opened(client)
    assert "4111" not in form["kwargs"]
    assert "ill" not in form["kwargs"]
    send(client, **{**form, "kwargs": form["kwargs"].replace("5", "6")})
    assert payload()["kwargs"] == {**given, "amount": 6}


def test_value_hidden_because_of_another_stays_hidden_when_that_is_edited(queue, client):
    given = {"kind": "private", "note": "he is ill"}
    queue.enqueue({"args": [], "kwargs": given}, id="job-1", name="tests.edit.pay")
    form = opened(client)
    response = send(client, **{**form, "kwargs": form["kwargs"].replace("private", "public")})
    assert "These arguments would expose a hidden value" in said(response)
    assert "he is ill" not in said(response)
    assert payload()["kwargs"] == given
    escaped = '{"kind": "public", "note": "\\u2022\\u2022\\u20221"}'
    assert "would expose a hidden value" in said(send(client, **{**form, "kwargs": escaped}))
    assert payload()["kwargs"] == given
    send(client, **{**form, "kwargs": '{"kind": "public", "note": "well"}'})
    assert payload()["kwargs"] == {"kind": "public", "note": "well"}


def test_equal_payloads_have_different_seals(queue, client):
    enqueue(queue, "ann", password="4711")
    first = opened(client)["seal"]
    assert opened(client)["seal"] != first
    send(client, **{**opened(client), "kwargs": '{"password": "4711"}'})
    assert opened(client)["seal"] != first


def test_outdated_form_does_not_confirm_a_guessed_secret(queue, client):
    """After a right guess, which changes nothing, an old form is refused as after a wrong one."""
    enqueue(queue, "ann", password="4711")
    for guess in ("4710", "4711"):
        old = opened(client)
        send(client, **{**opened(client), "kwargs": f'{{"password": "{guess}"}}'})
        assert payload()["kwargs"] == {"password": guess}
        assert "have changed since this form was opened" in said(send(client, **old)), guess
    old = opened(client)
    send(client, **{**opened(client), "kwargs": '{"password": "4711"}'})
    assert "have changed since this form was opened" in said(send(client, **old))


def test_size_of_payload_with_secret_is_not_shown(queue, client):
    size = re.compile(r"[0-9]+\s(?:bytes|KB)")
    enqueue(queue, "ann", password="4711")
    assert not size.search(said(client.get(address(BY_NAME["job"]))))
    send(client, **{**opened(client), "kwargs": "{}"})
    assert len(size.findall(said(client.get(address(BY_NAME["job"]))))) == 1, "the new payload, not the old"


def test_seal_is_rejected_for_another_job_and_after_it_expires(queue, client, monkeypatch):
    for job_id in ("job-1", "job-2"):
        queue.enqueue({"args": [1], "kwargs": {}}, id=job_id, name="tests.edit.mail")
    one, other = get_storage().reads.jobs("emails", ["job-1", "job-2"])
    seal = editing.editable(one).seal
    assert editing.is_sealed(one, seal)
    assert not editing.is_sealed(other, seal)
    assert not any(editing.is_sealed(one, bad) for bad in ("", ":", "::", "a:1:\xe9", f"{seal}0"))
    monkeypatch.setattr(editing, "SEALED", 0)
    assert not editing.is_sealed(one, seal)


def test_form_is_empty_if_redact_function_fails(queue, client):
    queue.enqueue({"args": ["secret"], "kwargs": {}}, id="job-1", name="tests.edit.broken")
    form = opened(client)
    assert (form["args"], form["kwargs"]) == ('"•••1"', '"•••1"')
    send(client, **form)
    assert payload() == {"args": ["secret"], "kwargs": {}}


def test_any_payload_that_json_can_represent_is_editable(queue, client):
    queue.enqueue({**SECRET, "n": 2**63, "raw": b"\xff"}, id="job-1")
    form = opened(client)
    assert str(2**63) in form["payload"]
    response = send(client, **{**form, "payload": form["payload"].replace("ann", "bob")})
    assert "Arguments changed" in said(response)
    assert payload() == {**SECRET, "to": "bob", "n": 2**63, "raw": b"\xff"}


def test_payload_that_json_cannot_represent_shows_the_reason(queue, client):
    queue.enqueue({"rates": {1: 2}}, id="job-1")
    text = said(client.get(address(BY_NAME["edit"])))
    assert "Arguments can't be edited: rates: JSON object keys must be strings; got 1." in text
    assert "<textarea" not in text


def test_edit_that_runs_job_again_requires_the_retry_permission(queue):
    enqueue(queue, "ann")
    end()
    editor = logged_in(one_with(*EDITOR))
    assert "requires permission to retry jobs" in said(editor.get(address(BY_NAME["edit"])))
    assert send(editor, how="retry", args='["bob"]', kwargs="{}").status_code == 403
    assert AuditEvent.objects.get().refused
    assert queue.get_job("job-1").state is State.FAILED
    assert payload()["args"] == ["ann"]


def test_edit_during_outage_keeps_the_input_and_the_old_payload(queue, client, monkeypatch):
    enqueue(queue, "ann")
    form = opened(client)

    def lost(*said, **how):
        raise StorageUnavailableError("no answer")

    monkeypatch.setattr(get_storage().jobs, "replace_payload", lost)
    response = send(client, **{**form, "args": '["bob"]'})
    assert "no answer" in said(response)
    assert '["bob"]' in said(response)
    assert PayloadVersion.objects.get().outcome == Revision.UNKNOWN
    assert "outcome unknown" in said(client.get(address(BY_NAME["job"])))
    assert not AuditEvent.objects.exists()


def test_unique_key_of_another_job_is_rejected(queue, client):
    queue.enqueue({"args": ["ann"], "kwargs": {}}, id="job-1", name="tests.edit.mail", unique_key="k")
    end()
    queue.enqueue({"args": ["eve"], "kwargs": {}}, id="other", name="tests.edit.mail", unique_key="k")
    response = send(client, **{**opened(client), "args": '["bob"]'})
    assert "another job has the same unique key" in said(response)
    assert queue.get_job("job-1").state is State.FAILED


def test_old_payloads_are_deleted_after_retention(queue, client, monkeypatch):
    enqueue(queue, "ann")
    send(client, **{**opened(client), "args": '["bob"]'})
    PayloadVersion.objects.update(at=PayloadVersion.objects.get().at.replace(year=2020))
    send(client, **{**opened(client), "args": '["eve"]'})
    assert [b"bob" in bytes(row.payload) for row in PayloadVersion.objects.all()] == [True]
