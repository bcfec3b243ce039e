"""On kernels whose Landlock knows less, the filter refuses what Landlock can't.

Only the rights of an older Landlock are used here; the rest of the kernel is that of the machine.
"""

from pathlib import Path

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox import apply, landlock
from tests.runtime.executors.sandbox.attempts import Attempt, named, needs_sandbox
from tests.runtime.executors.sandbox.harness import USERS, inside
from tests.runtime.executors.sandbox.test_attempts_on_files import IDENTITY, READS, WRITES
from tests.runtime.executors.sandbox.test_attempts_on_files import place as _place
from tests.runtime.executors.sandbox.test_attempts_on_network import ATTEMPTS as NETWORK
from tests.runtime.executors.sandbox.test_attempts_on_network import Servers
from tests.runtime.executors.sandbox.test_attempts_on_network import servers as _servers
from tests.runtime.executors.sandbox.test_attempts_on_processes import KERNEL, OTHERS, PROGRAMS, RIGHTS

pytestmark = [needs_sandbox, pytest.mark.slow]
KNOWN = landlock.abi()
ABIS = [version for version in (1, 2, 3, 4, 5, 6) if version < KNOWN]
place, servers = _place, _servers


@pytest.fixture(params=[ABIS[0], ABIS[-2]] if len(ABIS) > 1 else [KNOWN], ids=lambda version: f"abi{version}")
def old_landlock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    version = int(request.param)
    monkeypatch.setattr(landlock, "abi", lambda: version)
    return version


@named([*READS, *WRITES, *IDENTITY])
@pytest.mark.parametrize("user", USERS[:1])
def test_files_are_protected_with_an_older_landlock(
    attempt: Attempt[Path], place: Path, user: str, old_landlock: int
) -> None:
    attempt.is_refused(place, user)


@named(NETWORK)
@pytest.mark.parametrize("user", USERS[:1])
def test_network_is_protected_with_an_older_landlock(
    attempt: Attempt[Servers], servers: Servers, user: str, old_landlock: int
) -> None:
    attempt.is_refused(servers, user)


@named([*PROGRAMS, *OTHERS, *RIGHTS, *KERNEL])
@pytest.mark.parametrize("user", USERS[:1])
def test_processes_and_kernel_are_protected_with_an_older_landlock(
    attempt: Attempt[None], user: str, old_landlock: int
) -> None:
    attempt.is_refused(None, user)


@pytest.mark.parametrize("version", ABIS)
def test_read_permission_works_with_every_landlock_abi(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: version)

    assert inside(lambda: Path("/etc/hosts").read_bytes(), Permissions(read=["/etc/hosts"])).is_ok
    assert not inside(lambda: Path("/etc/passwd").read_bytes(), NOTHING).is_ok


@named(NETWORK)
@pytest.mark.parametrize("user", USERS[:1])
def test_network_is_denied_without_landlock(
    attempt: Attempt[Servers], servers: Servers, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    permissions = attempt.refused_with(servers)

    result = inside(
        lambda: attempt.action(servers), permissions, user=user, unenforced=apply.KERNEL_PERMISSIONS
    )
    assert result.errno in attempt.errors, result
