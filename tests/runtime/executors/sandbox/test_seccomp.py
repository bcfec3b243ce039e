"""A filter answers as its rules say, on both machines, and whatever a caller puts into the registers."""

import errno
import itertools
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox import SandboxError, seccomp
from djqueue.runtime.executors.sandbox.seccomp import (
    ALLOW,
    ERROR,
    KILL,
    NOTIFY,
    POINTER,
    Check,
    Filter,
    any_bits,
    equals,
    filter_for,
    has_action,
    is_null,
)
from djqueue.runtime.executors.sandbox.syscalls import AARCH64, X86_64, Machine, this_machine
from tests.runtime.executors.sandbox.bpf import answer
from tests.runtime.executors.sandbox.harness import run

# The lane of the sandbox runs them when the executors have changed.

PERM, NOSYS = ERROR | errno.EPERM, ERROR | errno.ENOSYS
MACHINES = pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
REGISTERS = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2, 0o6000, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1])
)


def asked(rules: Filter, name: str, *arguments: int) -> int:
    machine = rules.machine
    return answer(rules.instructions(), machine.audit_arch, machine.numbers[name], arguments)


@MACHINES
def test_system_call_of_another_architecture_kills_the_process(machine: Machine) -> None:
    code = Filter(machine).instructions()

    assert answer(code, 0x40000003, 20) == KILL
    assert answer(code, machine.audit_arch, 20) == ALLOW


def test_x32_call_kills_the_process_but_a_skipped_call_does_not() -> None:
    code = Filter(X86_64).instructions()

    assert answer(code, X86_64.audit_arch, 0x40000000) == KILL
    assert answer(code, X86_64.audit_arch, 0x40000000 | 39) == KILL
    assert answer(code, X86_64.audit_arch, -1) == NOSYS


@MACHINES
def test_unknown_system_call_is_not_implemented(machine: Machine) -> None:
    code = Filter(machine).instructions()

    for first, last in machine.gaps:
        for number in {first, (first + min(last, 1_000)) // 2, min(last, 1_000)}:
            assert answer(code, machine.audit_arch, number) == NOSYS
    for number in machine.numbers.values():
        assert answer(code, machine.audit_arch, number) == ALLOW


@MACHINES
def test_rule_applies_only_to_its_system_call(machine: Machine) -> None:
    rules = Filter(machine)
    rules.refuse("bpf", "ptrace")
    rules.refuse("openat2", error=errno.ENOSYS)
    rules.notify("connect")

    assert {asked(rules, name) for name in ("bpf", "ptrace")} == {PERM}
    assert asked(rules, "openat2") == NOSYS
    assert asked(rules, "connect") == NOTIFY
    special = {"bpf", "ptrace", "openat2", "connect"}
    assert {asked(rules, name) for name in machine.numbers if name not in special} == {ALLOW}


def test_hundreds_of_system_calls_can_be_denied() -> None:
    rules = Filter(X86_64)
    rules.refuse(*X86_64.numbers)

    assert {asked(rules, name) for name in X86_64.numbers} == {PERM}


def test_denied_cases_precede_allowed_cases_and_the_default() -> None:
    rules = Filter(X86_64)
    rules.allow_only_if("clone", (any_bits(0, 0x10000),))
    rules.refuse_if("clone", (any_bits(0, 0x20000),), error=errno.EACCES)

    assert asked(rules, "clone", 0x10000) == ALLOW
    assert asked(rules, "clone", 0x30000) == ERROR | errno.EACCES
    assert asked(rules, "clone", 17) == PERM


def test_fully_denied_system_call_stays_denied() -> None:
    rules = Filter(X86_64)
    rules.refuse("chmod")
    rules.refuse_if("chmod", (any_bits(1, 0o6000),))

    assert asked(rules, "chmod", 0, 0o644) == PERM


def test_int_argument_is_compared_without_its_upper_bits() -> None:
    rules = Filter(X86_64)
    rules.refuse_if("ioctl", (equals(1, 0x5412),))

    assert asked(rules, "ioctl", 0, 0x5412) == PERM
    assert asked(rules, "ioctl", 0, 0x5412 | 1 << 32) == PERM
    assert asked(rules, "ioctl", 0, 0x5413) == ALLOW


def test_pointer_argument_is_compared_with_all_bits() -> None:
    rules = Filter(X86_64)
    rules.allow_only_if("prlimit64", (equals(0, 0), is_null(2)))

    assert asked(rules, "prlimit64", 0, 0, 0) == ALLOW
    for pointer in (1, 2**32, 2**63, POINTER):
        assert asked(rules, "prlimit64", 0, 0, pointer) == PERM


MASKS = st.sampled_from([1, 0o6000, 2**32 - 1, 2**32, 2**64 - 1, 0xFF00000000FF])
CHECKS = st.builds(
    lambda argument, mask, value, negated: Check(argument, mask, value & mask, negated),
    st.integers(0, 5),
    MASKS,
    st.sampled_from([0, 1, 2, 3, 2**32, 2**32 + 1]),
    st.booleans(),
)


@given(
    st.lists(st.lists(CHECKS, min_size=1, max_size=3).map(tuple), max_size=4),
    st.lists(st.lists(CHECKS, min_size=1, max_size=3).map(tuple), max_size=4),
    st.tuples(*[st.one_of(REGISTERS, st.integers(0, 3))] * 6),
)
def test_assembled_filter_computes_its_conditions(
    refused: list[tuple[Check, ...]], allowed: list[tuple[Check, ...]], arguments: tuple[int, ...]
) -> None:
    rules = Filter(X86_64)
    rules.refuse_if("ioctl", *refused, error=errno.EACCES)
    rules.allow_only_if("ioctl", *allowed)

    if any(all(check.holds(arguments) for check in case) for case in refused):
        expected = ERROR | errno.EACCES
    elif any(all(check.holds(arguments) for check in case) for case in allowed):
        expected = ALLOW
    else:
        expected = PERM
    assert asked(rules, "ioctl", *arguments) == expected


def test_impossible_condition_is_an_error() -> None:
    with pytest.raises(ValueError, match="no masked argument has the value 0x4"):
        Check(0, 3, 4)


def test_too_long_filter_is_an_error() -> None:
    rules = Filter(X86_64)
    rules.refuse_if("ioctl", *((equals(1, value),) for value in range(2_000)))

    with pytest.raises(SandboxError, match="is longer than 4,096"):
        rules.instructions()


# The filter of a job.

ALL = Permissions(read=True, write=True, net=True, run=True, listen=True)
SETS = [
    NOTHING,
    ALL,
    Permissions(net=["127.0.0.1"]),
    Permissions(run=["/bin/true"]),
    Permissions(listen=[80]),
]


@MACHINES
@pytest.mark.parametrize("permissions", SETS, ids=Permissions.describe)
def test_no_permission_allows_a_forbidden_system_call(machine: Machine, permissions: Permissions) -> None:
    refused = [name for names in seccomp.REFUSED.values() for name in names.split()]
    unavailable = seccomp.UNAVAILABLE.split()
    for may_fork, abi in itertools.product((True, False), (0, 1, 4, 7)):
        rules = filter_for(permissions, machine, may_fork=may_fork, abi=abi)

        assert {asked(rules, name) for name in refused if name in machine.numbers} == {PERM}
        assert {asked(rules, name) for name in unavailable if name in machine.numbers} == {NOSYS}


INET, INET6, UNIX, NETLINK, PACKET, ALG, VSOCK = 2, 10, 1, 16, 17, 38, 40
FLAGS = 0o2004000


def sockets(permissions: Permissions) -> set[tuple[int, int, int]]:
    rules = filter_for(permissions, X86_64, may_fork=False)
    return {
        (family, kind, protocol)
        for family in (0, UNIX, INET, INET6, NETLINK, PACKET, ALG, VSOCK)
        for kind in (1, 2, 3, 5)
        for protocol in (0, 1, 6, 17, 132, 255, 262)
        if asked(rules, "socket", family, kind | FLAGS, protocol) == ALLOW
    }


def test_allowed_socket_types_follow_the_network_permissions() -> None:
    tcp = {(family, 1, protocol) for family in (INET, INET6) for protocol in (0, 6)}
    udp = {(family, 2, protocol) for family in (INET, INET6) for protocol in (0, 17)}

    assert sockets(NOTHING) == set()
    assert sockets(Permissions(net=["127.0.0.1"])) == tcp
    assert sockets(Permissions(listen=[80])) == tcp
    assert sockets(Permissions(net=["unix:/run/x"])) == tcp | {
        (UNIX, 1, protocol) for protocol in (0, 1, 6, 17, 132, 255, 262)
    }
    assert {one for one in sockets(Permissions(net=True)) if one[0] != UNIX} == tcp | udp


@pytest.mark.parametrize(
    ("permissions", "expected"),
    [
        (NOTHING, PERM),
        (Permissions(net=["a.example"]), NOTIFY),
        (ALL, ALLOW),
        (Permissions(listen=[1]), PERM),
    ],
)
def test_connect_is_denied_supervised_or_allowed_by_permission(
    permissions: Permissions, expected: int
) -> None:
    assert asked(filter_for(permissions, X86_64, may_fork=False), "connect") == expected


def test_second_filter_leaves_connect_to_the_listener_of_the_first() -> None:
    rules = filter_for(Permissions(net=["a.example"]), X86_64, may_fork=False, is_supervised=True)

    assert asked(rules, "connect") == ALLOW


@MACHINES
def test_filter_allows_forks_only_in_the_template_process(machine: Machine) -> None:
    def result(permissions: Permissions, may_fork: bool, flags: int) -> int:
        return asked(filter_for(permissions, machine, may_fork=may_fork), "clone", flags)

    fork, thread, namespace = 0x01200011, 0x003D0F00, 0x10000000
    assert result(NOTHING, True, fork) == ALLOW
    assert result(NOTHING, False, fork) == PERM
    assert result(NOTHING, False, thread) == ALLOW
    assert result(Permissions(run=True), False, fork) == ALLOW
    for bits in (namespace, 0x20000, 0x02000000, 0x40000000, 0x8000, 0x2000):
        for granted in (NOTHING, ALL):
            assert result(granted, True, thread | bits) == PERM
            assert result(granted, True, fork | bits) == PERM


@pytest.mark.parametrize(
    ("abi", "may_fork", "permissions", "others", "own"),
    [
        (7, True, NOTHING, ALLOW, ALLOW),
        (7, False, NOTHING, PERM, ALLOW),
        (7, False, ALL, ALLOW, ALLOW),
        (5, True, NOTHING, PERM, ALLOW),
        (5, False, NOTHING, PERM, ALLOW),
        (5, False, ALL, PERM, ALLOW),
    ],
)
def test_filter_leaves_signals_to_landlock_only_if_landlock_supports_them(
    abi: int, may_fork: bool, permissions: Permissions, others: int, own: int
) -> None:
    rules = filter_for(permissions, X86_64, may_fork=may_fork, abi=abi, pid=77)

    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        assert asked(rules, name, 1, 9) == others
        assert asked(rules, name, 77, 9) == own
        # Groups of processes, among them "all".
        assert asked(rules, name, -1, 9) == others
        assert asked(rules, name, 0, 9) == others


@pytest.mark.parametrize("abi", [0, 1, 2])
def test_filter_denies_truncation_if_landlock_does_not_support_it(abi: int) -> None:
    old = filter_for(NOTHING, X86_64, may_fork=False, abi=abi)
    new = filter_for(NOTHING, X86_64, may_fork=False, abi=3)

    assert asked(old, "truncate") == PERM
    assert asked(old, "openat", 0, 0, 0o1000) == PERM
    assert asked(old, "open", 0, 0o1000) == PERM
    assert asked(old, "openat", 0, 0, 0o1001) == ALLOW
    assert asked(new, "truncate") == ALLOW
    assert asked(new, "openat", 0, 0, 0o1000) == ALLOW


@MACHINES
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("chmod", (0, 0o4755)),
        ("fchmod", (0, 0o2755)),
        ("fchmodat", (0, 0, 0o6755)),
        ("fchmodat2", (0, 0, 0o4000)),
        ("creat", (0, 0o4755)),
        ("open", (0, 0o101, 0o4755)),
        ("openat", (0, 0, 0o101, 0o2755)),
        ("openat", (0, 0, 0o20200001, 0o2755)),
        ("mknod", (0, 0o104755)),
        ("mknodat", (0, 0, 0o104755)),
    ],
)
def test_no_permission_allows_set_id_bits(machine: Machine, name: str, arguments: tuple[int, ...]) -> None:
    if name not in machine.numbers:
        pytest.skip(f"{machine.name} has no {name}")
    rules = filter_for(ALL, machine, may_fork=False)

    *start, mode = arguments
    assert asked(rules, name, *arguments) == PERM
    assert asked(rules, name, *start, mode | 1 << 40) == PERM
    assert asked(rules, name, *start, mode & ~0o6000) == ALLOW


def test_open_mode_is_checked_only_if_a_file_is_created() -> None:
    rules = filter_for(ALL, X86_64, may_fork=False)

    assert asked(rules, "openat", 0, 0, 0, 0o6755) == ALLOW


@pytest.mark.parametrize("may_fork", [True, False])
def test_limits_of_other_processes_cannot_be_changed(may_fork: bool) -> None:
    rules = filter_for(ALL, X86_64, may_fork=may_fork)

    assert asked(rules, "prlimit64", 1, 7, 0x1000) == PERM
    assert asked(rules, "prlimit64", 0, 7, 0) == ALLOW
    assert asked(rules, "prlimit64", 0, 7, 0x1000) == (ALLOW if may_fork else PERM)
    assert asked(rules, "setrlimit", 7, 0x1000) == (ALLOW if may_fork else PERM)
    for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        assert (asked(rules, name, 1), asked(rules, name, 0)) == (PERM, ALLOW)
    assert (asked(rules, "setpriority", 0, 1), asked(rules, "setpriority", 0, 0)) == (PERM, ALLOW)
    assert (asked(rules, "setpriority", 2, 0), asked(rules, "ioprio_set", 1, 0)) == (PERM, ALLOW)


def test_template_process_can_add_a_filter_but_not_a_listener() -> None:
    template = filter_for(NOTHING, X86_64, may_fork=True)
    child = filter_for(NOTHING, X86_64, may_fork=False)

    assert asked(template, "seccomp", 1, 0) == ALLOW
    assert asked(template, "seccomp", 1, 1) == ALLOW
    assert asked(template, "seccomp", 1, 8) == PERM
    assert asked(template, "seccomp", 1, 9) == PERM
    assert asked(template, "seccomp", 0, 0) == PERM
    assert asked(child, "seccomp", 1, 0) == PERM


def test_prctl_options_that_weaken_the_sandbox_are_denied() -> None:
    template = filter_for(ALL, X86_64, may_fork=True)
    child = filter_for(ALL, X86_64, may_fork=False)
    set_dumpable, set_seccomp, set_ptracer, set_mm, keep_caps, set_name = 4, 22, 0x59616D61, 35, 8, 15

    for option in (set_dumpable, set_seccomp, set_ptracer, set_mm, keep_caps, 28, 47, 59):
        assert asked(template, "prctl", option) == PERM
        assert asked(child, "prctl", option) == PERM
        assert asked(child, "prctl", option | 1 << 32) == PERM
    assert asked(child, "prctl", set_name) == ALLOW
    # A job must not outlive its worker.
    assert (asked(template, "prctl", 1), asked(child, "prctl", 1)) == (ALLOW, PERM)


@given(st.sampled_from(sorted(X86_64.numbers)), st.tuples(*[REGISTERS] * 6), st.sampled_from(SETS))
def test_second_stage_allows_no_call_that_the_first_denies(
    name: str, arguments: Any, permissions: Permissions
) -> None:
    first = asked(filter_for(permissions, X86_64, may_fork=True, abi=7), name, *arguments)
    second = asked(filter_for(permissions, X86_64, may_fork=False, abi=7, pid=5), name, *arguments)

    assert first in (ALLOW, second)


# Installing it.


@pytest.mark.skipif(not has_action(ALLOW), reason="the kernel has no seccomp filters")
def test_installed_filter_applies_to_every_thread() -> None:
    def use() -> list[int | None]:
        found: list[int | None] = []
        ready, go = threading.Event(), threading.Event()

        def work() -> None:
            ready.set()
            go.wait()
            try:
                os.fchown(-1, -1, -1)
            except OSError as error:
                found.append(error.errno)

        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        rules = Filter(this_machine())
        rules.refuse("fchown", error=errno.EXDEV)
        rules.install()
        go.set()
        thread.join()
        return found

    assert run(use).value == [errno.EXDEV]


@pytest.mark.skipif(not has_action(NOTIFY), reason="the kernel has no seccomp notifications")
def test_process_has_at_most_one_listener() -> None:
    def install() -> None:
        for _ in range(2):
            rules = Filter(this_machine())
            rules.notify("connect")
            assert rules.install(listener=True) > 2

    result = run(install)
    assert result.error == "SandboxUnavailableError"
    assert "supervised already" in result.text
