"""Found where DJQUEUE["MODULES"] has its dotted path."""

from djqueue import job


@job
def count():
    """Count what is there."""
    return 0
