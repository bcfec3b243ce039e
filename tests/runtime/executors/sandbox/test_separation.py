"""Each permission opens only its own resources, alone and combined with the others."""

from pathlib import Path
from typing import Any

import pytest

from djqueue.core.permissions import Permissions
from tests.runtime.executors.sandbox.attempts import Attempt, named, needs_sandbox
from tests.runtime.executors.sandbox.harness import USERS, inside
from tests.runtime.executors.sandbox.test_attempts_on_files import READS, WRITES
from tests.runtime.executors.sandbox.test_attempts_on_files import place as _place
from tests.runtime.executors.sandbox.test_attempts_on_network import ATTEMPTS as NETWORK
from tests.runtime.executors.sandbox.test_attempts_on_network import Servers
from tests.runtime.executors.sandbox.test_attempts_on_network import servers as _servers
from tests.runtime.executors.sandbox.test_attempts_on_processes import PROGRAMS

pytestmark = [needs_sandbox, pytest.mark.slow]
place, servers = _place, _servers
USER = pytest.mark.parametrize("user", USERS[:1])


def is_refused(attempt: Attempt[Any], place: Any, permissions: Permissions, user: str) -> None:
    result = inside(lambda: attempt.action(place), permissions, user=user)
    assert not result.is_ok, f"{permissions.describe()} allowed it: {result}"
    assert result.errno in attempt.errors, result
    assert attempt.check(place)


@named(READS)
@USER
def test_reading_requires_read_or_write_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    is_refused(attempt, place, Permissions(net=True, run=True, listen=True, env=True, db=True), user)


@named(WRITES)
@USER
def test_writing_requires_write_permission(attempt: Attempt[Path], place: Path, user: str) -> None:
    is_refused(attempt, place, Permissions(read=True, net=True, run=True, listen=True), user)


@named(NETWORK)
@USER
def test_network_access_requires_net_or_listen_permission(
    attempt: Attempt[Servers], servers: Servers, user: str
) -> None:
    is_refused(attempt, servers, Permissions(read=True, write=True, run=True), user)


@named([one for one in NETWORK if "listen" not in one.name and one.name != "bind"])
@USER
def test_connecting_requires_net_permission(attempt: Attempt[Servers], servers: Servers, user: str) -> None:
    is_refused(attempt, servers, Permissions(read=True, write=True, run=True, listen=True), user)


@named([one for one in NETWORK if "listen" in one.name or one.name == "bind"])
@USER
def test_listening_requires_listen_permission(attempt: Attempt[Servers], servers: Servers, user: str) -> None:
    is_refused(attempt, servers, Permissions(read=True, write=True, run=True, net=True), user)


@named(PROGRAMS)
@USER
def test_starting_programs_requires_run_permission(attempt: Attempt[None], user: str) -> None:
    is_refused(attempt, None, Permissions(read=True, write=True, net=True, listen=True), user)
