"""Found where DJQUEUE["MODULES"] has `tasks`."""

from djqueue import job


@job
def pack(order_id):
    """Pack an order."""
    return f"packed {order_id}"
