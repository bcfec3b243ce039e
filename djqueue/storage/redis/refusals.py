"""Recognize a server that rejects the user or the password, and say what to check."""

from redis import exceptions as errors

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.messages import in_one_line

REFUSALS = ("WRONGPASS", "NOAUTH", "NOPERM", "AuthenticationError")
"""Errors for a wrong password, no password, and missing permissions, as those of clusters and sentinels quote
them."""


def is_refusal(error: BaseException) -> bool:
    """Return whether the server rejects the user or the password."""
    # To the client these are connection errors, which it would retry.
    kinds = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)
    return isinstance(error, kinds) or any(word in str(error) for word in REFUSALS)


def refused(where: str, error: BaseException) -> StorageUnavailableError:
    """Return the error for a server that rejects the user or the password."""
    return StorageUnavailableError(
        f"{where} refuses access: {in_one_line(error).rstrip('.')}. Check the user name and the password in "
        "the URL, in DJQUEUE['STORAGE'] or in the cache that it names, and the user's permissions (ACL)."
    )
