"""The tables of system calls agree with the headers of the kernel, where a machine has them."""

import re
from pathlib import Path

import pytest

from djqueue.runtime.executors.sandbox import SandboxUnavailableError, syscalls
from djqueue.runtime.executors.sandbox.syscalls import AARCH64, MACHINES, X86_64, Machine, this_machine

X86_HEADERS = [
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm/unistd_64.h"),
]
GENERIC_HEADER = Path("/usr/include/asm-generic/unistd.h")
ON_32_BIT_ONLY = range(403, 424)
NOT_ON_ARM = {"sync_file_range2", "arch_specific_syscall", "syscalls"}
LINE = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*")


def defined(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines()
    return {found[1]: int(found[2]) for line in lines if (found := LINE.fullmatch(line))}


def test_x86_64_numbers_match_the_kernel_headers() -> None:
    path = next((path for path in X86_HEADERS if path.exists()), None)
    if path is None:
        pytest.skip("the kernel's headers for x86_64 are not installed")
    headers = defined(path)

    assert {name: X86_64.numbers.get(name) for name in headers} == headers


def test_aarch64_numbers_match_the_generic_headers() -> None:
    if not GENERIC_HEADER.exists():
        pytest.skip("the kernel's generic headers are not installed")
    headers = {
        "newfstatat" if name == "fstatat" else name: number
        for name, number in defined(GENERIC_HEADER).items()
        if name not in NOT_ON_ARM and number not in ON_32_BIT_ONLY
    }

    assert {name: AARCH64.numbers.get(name) for name in headers} == headers


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
def test_each_system_call_number_has_one_name(machine: Machine) -> None:
    assert len(set(machine.numbers.values())) == len(machine.numbers)


def test_both_machines_share_the_numbers_of_new_system_calls() -> None:
    new = {name: number for name, number in X86_64.numbers.items() if number >= 424}

    assert {name: AARCH64.numbers.get(name) for name in new} == new
    assert new["clone3"] == 435
    assert new["fchmodat2"] == 452
    assert new["file_setattr"] == 469


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
def test_each_number_is_known_or_in_a_documented_gap(machine: Machine) -> None:
    in_gaps = {number for first, last in machine.gaps for number in range(first, min(last, 1_000) + 1)}

    assert in_gaps | set(machine.numbers.values()) == set(range(1_001))
    assert in_gaps & set(machine.numbers.values()) == set()
    assert machine.gaps[-1][1] == 2**32 - 1


def test_misspelled_call_is_an_error_and_missing_call_is_skipped() -> None:
    assert AARCH64.numbers_of("open", "openat", "openat") == (56,)
    with pytest.raises(KeyError, match="opennat"):
        X86_64.numbers_of("opennat")


@pytest.mark.parametrize("name", ["riscv64", "i686", "armv7l", ""])
def test_unknown_machine_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Uname:
        machine = name

    monkeypatch.setattr(syscalls.os, "uname", Uname)
    with pytest.raises(SandboxUnavailableError, match=f"this is .* on {name}"):
        this_machine()


def test_machines_are_known_by_their_system_names() -> None:
    assert {name: machine.name for name, machine in MACHINES.items()} == {
        "x86_64": "x86_64",
        "amd64": "x86_64",
        "aarch64": "aarch64",
        "arm64": "aarch64",
    }
