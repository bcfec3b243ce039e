"""Found by djqueue as every app's `jobs` module is."""

from djqueue import job


@job(queue="emails", max_attempts=5)
def send_receipt(order_id):
    """Send the receipt of an order."""
    return f"receipt of {order_id}"
