"""What workers do, done by a test."""

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errorgroups import ErrorKey, Sighting, fingerprint_of
from djqueue.core.job import ClaimRequest, JobFailure, Outcome
from djqueue.core.units import to_datetime
from djqueue.models import ErrorGroup
from djqueue.operations import errorgroups

NAME = "emails"


def claim(queue=NAME, names=None, slots=1):
    """Claim the next jobs of a queue, whose names are its own unless others are given."""
    wanted = frozenset(names or {queue})
    return get_storage().claim(ClaimRequest("w1", slots, wanted, (queue,))).jobs


def fail(job_id, message="no address", queue=NAME, error_type="shop.NoAddressError"):
    """The next job of a queue, which is this one, fails for good."""
    [claimed] = claim(queue)
    assert claimed.id == job_id
    error = JobFailure(error_type, message, "Traceback: line 3")
    get_storage().finish([Outcome(queue, job_id, claimed.token, "fail", None, 0, error, "explicit_fail")])
    note_error(claimed.name, message, queue, error_type)


def note_error(name, message="no address", queue=NAME, error_type="shop.NoAddressError", version=""):
    """An attempt failed for good, as the worker counts it."""
    key = ErrorKey(queue, name, error_type, "", fingerprint_of(error_type, name, message), version)
    now = SYSTEM_CLOCK.now()
    errorgroups.record("default", [Sighting(key, 1, 1, now, now, message)])


def add_error(queue=NAME, key="abc"):
    """Add the row of an error that the pages show."""
    now = to_datetime(SYSTEM_CLOCK.now())
    return ErrorGroup.objects.create(
        queue=queue,
        key=key,
        fingerprints=[key],
        name=queue,
        error_type="shop.NoAddressError",
        title="no address",
        message="no address",
        place="shop/jobs.py:send",
        first_seen=now,
        last_seen=now,
        attempts=3,
        versions={"v1": [3, SYSTEM_CLOCK.now(), SYSTEM_CLOCK.now()]},
    )


def complete(job_id, queue=NAME, names=None):
    """The next job of a queue, which is this one, ends well."""
    [claimed] = claim(queue, names)
    assert claimed.id == job_id
    get_storage().finish([Outcome(queue, job_id, claimed.token, "complete", b"\xc0", 0, None, "")])
