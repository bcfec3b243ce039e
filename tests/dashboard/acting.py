"""What workers do, done by a test."""

from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest, JobFailure, Outcome

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


def complete(job_id, queue=NAME, names=None):
    """The next job of a queue, which is this one, ends well."""
    [claimed] = claim(queue, names)
    assert claimed.id == job_id
    get_storage().finish([Outcome(queue, job_id, claimed.token, "complete", b"\xc0", 0, None, "")])
