"""A system that can't enforce a permission says so, with what is missing and what to do."""

import os
from typing import Any

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox import SandboxUnavailableError, apply, landlock, syscalls
from djqueue.runtime.executors.sandbox.apply import Sandbox, enforceable, missing_layers
from djqueue.runtime.executors.sandbox.seccomp import ALLOW, NOTIFY

ALL = Permissions(read=True, write=True, net=True, run=True, listen=True)
LISTEN = Permissions(listen=[80])
HOSTS = Permissions(net=["a.example"])


class Kernel:
    """A kernel whose features a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = "6.18.0-test"
        self.actions = {ALLOW, NOTIFY}
        self.version = 7
        self.machine = "x86_64"
        monkeypatch.setattr(landlock, "abi", lambda: self.version)
        monkeypatch.setattr(apply, "has_action", lambda action: action in self.actions)
        monkeypatch.setattr(syscalls.os, "uname", lambda: self)
        monkeypatch.setattr(syscalls.sys, "platform", "linux")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def missing(permissions: Permissions) -> dict[str, tuple[str, ...]]:
    return {layer.layer: layer.permissions for layer in missing_layers(permissions)}


EACH = pytest.mark.parametrize("permissions", [NOTHING, ALL, LISTEN, HOSTS], ids=Permissions.describe)


@EACH
def test_current_kernel_enforces_all_permissions(kernel: Kernel, permissions: Permissions) -> None:
    assert missing_layers(permissions) == ()
    assert enforceable(permissions, ()) == permissions


@EACH
def test_unknown_machine_enforces_no_permission(kernel: Kernel, permissions: Permissions) -> None:
    kernel.machine = "riscv64"

    names = tuple(name for name in apply.KERNEL_PERMISSIONS if getattr(permissions, name) is not True)
    assert missing(permissions) == ({"a supported system": names} if names else {})


def test_error_for_another_operating_system_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls.sys, "platform", "darwin")

    found = missing_layers(NOTHING)
    assert "this is darwin on" in str(found[0])


def test_kernel_without_seccomp_enforces_no_permission(kernel: Kernel) -> None:
    kernel.actions = set()

    assert missing(NOTHING) == {"seccomp filters": apply.KERNEL_PERMISSIONS}
    assert missing(ALL) == {}


@pytest.mark.parametrize(
    ("permissions", "ineffective"),
    [
        (NOTHING, ("read", "write")),
        (Permissions(read=True, write=True), ()),
        (Permissions(read=True, write=True, run=["/bin/true"]), ("run",)),
        (Permissions(read=True, write=["/srv"], listen=[80]), ("write", "listen")),
    ],
)
def test_kernel_without_landlock_does_not_protect_files(
    kernel: Kernel, permissions: Permissions, ineffective: tuple[str, ...]
) -> None:
    kernel.version = 0

    (layer,) = missing_layers(permissions)
    assert layer.permissions == tuple(
        name for name in apply.KERNEL_PERMISSIONS if getattr(permissions, name) is not True
    )
    assert layer.ineffective == ineffective


@pytest.mark.parametrize("version", [1, 2, 3])
def test_old_landlock_cannot_enforce_ports(kernel: Kernel, version: int) -> None:
    kernel.version = version

    assert missing(LISTEN) == {"Landlock ABI 4": ("listen",)}
    assert missing(NOTHING) == missing(Permissions(listen=True)) == missing(HOSTS) == {}


@pytest.mark.parametrize(
    ("release", "actions"), [("5.8.0", {ALLOW, NOTIFY}), ("4.19.0-1", {ALLOW}), ("6.1.0", {ALLOW})]
)
def test_list_of_hosts_requires_seccomp_notifications(
    kernel: Kernel, release: str, actions: set[int]
) -> None:
    kernel.release, kernel.actions = release, actions

    assert missing(HOSTS) == {"seccomp notifications": ("net",)}
    assert missing(NOTHING) == {}


def test_error_message_names_permission_layer_kernel_and_remedy(kernel: Kernel) -> None:
    kernel.version = 0

    with pytest.raises(SandboxUnavailableError) as caught:
        enforceable(NOTHING, ["read", "net", "run", "listen"])
    assert str(caught.value) == (
        "this system can't enforce the permissions: read, write, net, run, listen: needs Landlock, but Linux "
        "6.18.0-test does not have it, or it is switched off; use Linux 5.13 or newer, and add landlock to "
        "the kernel's lsm= option"
    )
    assert caught.value.exit_code == 78 == os.EX_CONFIG


def test_accepted_gaps_keep_the_other_permissions_enforced(kernel: Kernel) -> None:
    kernel.version = 0

    assert enforceable(HOSTS, apply.KERNEL_PERMISSIONS) == Permissions(
        read=True, write=True, net=["a.example"]
    )
    sandbox = Sandbox(HOSTS, {}, unenforced=apply.KERNEL_PERMISSIONS)
    assert sandbox.unenforced == apply.KERNEL_PERMISSIONS
    assert sandbox.permissions.net == ("a.example",)


def test_accepted_gaps_on_an_unknown_system_enforce_no_permission(kernel: Kernel) -> None:
    kernel.machine = "riscv64"
    kernel.actions = set()
    sandbox = Sandbox(HOSTS, {}, unenforced=apply.KERNEL_PERMISSIONS)

    sandbox.stage_one()
    sandbox.stage_two()
    assert sandbox.unenforced == apply.KERNEL_PERMISSIONS


def test_gaps_are_accepted_only_where_they_exist(kernel: Kernel) -> None:
    assert enforceable(HOSTS, ["read", "write", "net"]) == HOSTS
    assert Sandbox(HOSTS, {}, unenforced=["read", "net"]).unenforced == ()


def test_unenforceable_sandbox_is_rejected_before_the_process_is_changed(kernel: Kernel) -> None:
    kernel.version = 0
    given: dict[str, Any] = {"permissions": NOTHING, "values": {}}

    with pytest.raises(SandboxUnavailableError, match="read, write, net, run, listen: needs Landlock"):
        Sandbox(**given)
