"""URLs of the dashboard's pages, and users who visit them."""

import re
from typing import Any

from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from djqueue.dashboard import rights
from djqueue.dashboard.site import DashboardPage
from djqueue.dashboard.urls import PAGES
from tests.admin.factories import logged_in, make_superuser, make_user

CAPTURED = {
    "queue": "emails",
    "job_id": "job-1",
    "pk": 1,
    "concurrency_key": "abc",
    "root": "job-1",
    "worker": "w1",
    "write": "write-1",
    "name": "emails",
    "key": "abc",
}
"""Values for the captures of routes."""


def address(page: DashboardPage, site: str = "admin", **query: Any) -> str:
    names = re.findall(r"<(?:\w+:)?(\w+)>", page.route)
    where = f"{site}:djqueue_dashboard_{page.name}"
    return reverse(where, kwargs={name: CAPTURED[name] for name in names}, query=query or None)


def visit(client: Client, page: DashboardPage, method: str | None = None, **headers: str) -> Any:
    return client.generic(method or page.method, address(page), headers=headers or None)


def one_with(*chosen: str) -> User:
    """Make a staff user with these permissions."""
    return make_user(*set(chosen))


def one_without(right: str) -> User:
    """Make a staff user with every permission but this one."""
    return make_user(*(one for one in ALL_RIGHTS if one != right))


ALL_RIGHTS = tuple(value for name, value in vars(rights).items() if name.isupper() and isinstance(value, str))

__all__ = [
    "ALL_RIGHTS",
    "PAGES",
    "address",
    "logged_in",
    "make_superuser",
    "one_with",
    "one_without",
    "visit",
]
