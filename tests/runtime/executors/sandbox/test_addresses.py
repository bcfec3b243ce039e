"""Addresses are compared with the list, and with the names in it while their addresses are valid."""

import socket
import struct
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.permissions import Permissions
from djqueue.runtime.executors.sandbox import addresses
from djqueue.runtime.executors.sandbox.addresses import (
    ADDRESSES_VALID,
    NAMES_VALID,
    AddressBook,
    Target,
    parse_address,
)


def inet(text: str, port: int) -> bytes:
    address = ip_address(text)
    if address.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, address.packed)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", port, 0, address.packed, 0)


def target(text: str, port: int) -> Target:
    found = parse_address(inet(text, port))
    assert found is not None
    return found


class Names:
    """A name server whose answers a test sets, and which counts questions."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = {name.replace("_", "."): found for name, found in answers.items()}
        self.asked: list[str] = []

    def __call__(self, name: str, port: None, **_: Any) -> list[tuple[Any, ...]]:
        assert port is None
        self.asked.append(name)
        if name not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return [
            (socket.AF_INET6 if ":" in text else socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 0))
            for text in self.answers[name]
        ]


class Seconds:
    """A clock that stands until a test moves it."""

    def __init__(self) -> None:
        self.value = 1_000.0

    def __call__(self) -> float:
        return self.value


def book(*net: str, **answers: list[str]) -> tuple[AddressBook, Names, Seconds]:
    names, now = Names(**answers), Seconds()
    return AddressBook(Permissions(net=list(net)), names, now), names, now


def allows(one: AddressBook, text: str, port: int = 443) -> bool:
    return one.checked(target(text, port)) is not None


# Addresses in memory.


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (inet("192.0.2.1", 80), "192.0.2.1:80"),
        (inet("192.0.2.1", 80) + bytes(100), "192.0.2.1:80"),
        (inet("2001:db8::1", 443), "[2001:db8::1]:443"),
        (inet("2001:db8::1", 443)[:24], "[2001:db8::1]:443"),
        (struct.pack("=H", socket.AF_UNIX) + b"/run/x\0garbage", "unix:/run/x"),
        (struct.pack("=H", socket.AF_UNIX) + b"/run/x", "unix:/run/x"),
        (struct.pack("=H", socket.AF_UNIX) + b"\0run/x", "unix:@run/x"),
        (struct.pack("=H", socket.AF_UNIX) + b"\0/run/x", "unix:@/run/x"),
    ],
)
def test_socket_address_is_parsed_as_the_kernel_does(raw: bytes, expected: str) -> None:
    assert str(parse_address(raw)) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x02",
        bytes(16),
        inet("192.0.2.1", 80)[:15],
        inet("::1", 80)[:23],
        struct.pack("=H", socket.AF_UNIX),
        struct.pack("=H", socket.AF_NETLINK) + bytes(10),
    ],
)
def test_unsupported_socket_addresses_have_no_target(raw: bytes) -> None:
    assert parse_address(raw) is None


@given(st.binary(max_size=128))
def test_arbitrary_bytes_are_parsed_without_errors(raw: bytes) -> None:
    found = parse_address(raw)

    if found is not None:
        assert str(found)
        assert len(found.raw) <= max(len(raw), 28)


# The list.


def test_listed_ip_address_needs_no_name_resolution() -> None:
    one, names, _ = book("192.0.2.0/24:443", "[2001:db8::1]:443")

    assert allows(one, "192.0.2.7")
    assert allows(one, "::ffff:192.0.2.7")
    assert allows(one, "2001:db8::1")
    assert not allows(one, "192.0.2.7", 80)
    assert not allows(one, "198.51.100.1")
    assert names.asked == []


def test_unix_socket_is_matched_by_path_in_a_fixed_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    one, _, _ = book(f"unix:{tmp_path}/link/x")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/etc")

    found = one.checked(Target(family=socket.AF_UNIX, path=f"{tmp_path}/link/x"))
    assert found is not None
    assert found.directory == f"{tmp_path}/real"
    assert one.checked(Target(family=socket.AF_UNIX, path=f"{tmp_path}/real/x")) is None


# Names.


def test_resolved_name_allows_its_addresses_on_the_listed_port() -> None:
    one, _, _ = book("a.example:443", a_example=["192.0.2.1", "2001:db8::1"])

    assert one.resolve("A.example.", 443) == [
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
    ]
    assert allows(one, "192.0.2.1")
    assert allows(one, "2001:db8::1")
    assert not allows(one, "192.0.2.1", 80)
    assert not allows(one, "192.0.2.2")


def test_name_without_a_port_allows_every_port() -> None:
    one, _, _ = book("a.example", a_example=["192.0.2.1"])
    one.resolve("a.example", None)

    assert allows(one, "192.0.2.1", 22)


def test_subdomains_of_a_listed_suffix_can_be_resolved() -> None:
    one, _, _ = book("*.example:443", a_example=["192.0.2.1"], a_other=["192.0.2.2"])

    assert not allows(one, "192.0.2.1")
    one.resolve("a.example", 443)
    assert allows(one, "192.0.2.1")


@pytest.mark.parametrize(
    ("name", "port"), [("b.example", 443), ("a.example", 80), ("a.example.evil", 443), ("", 443)]
)
def test_unlisted_name_is_not_resolved(name: str, port: int) -> None:
    one, names, _ = book("a.example:443", a_example=["192.0.2.1"], b_example=["192.0.2.2"])

    with pytest.raises(PermissionError, match="the permission net does not list"):
        one.resolve(name, port)
    assert names.asked == []


def test_resolving_an_ip_address_returns_it_and_allows_nothing() -> None:
    one, names, _ = book("a.example")

    assert one.resolve("198.51.100.1", 443) == [(socket.AF_INET, "198.51.100.1")]
    assert one.resolve("::1", None) == [(socket.AF_INET6, "::1")]
    assert names.asked == []
    assert not allows(one, "198.51.100.1")


def test_listed_name_is_resolved_when_its_address_is_used() -> None:
    """Some libraries resolve names themselves."""
    one, names, _ = book("a.example:443", "b.example:80", a_example=["192.0.2.1"], b_example=["192.0.2.2"])

    assert allows(one, "192.0.2.1")
    assert not allows(one, "192.0.2.2")
    assert names.asked == ["a.example"]
    assert allows(one, "192.0.2.2", 80)


def test_names_are_not_resolved_again_for_every_denied_connection() -> None:
    one, names, now = book("a.example", a_example=["192.0.2.1"])

    for _ in range(5):
        assert not allows(one, "198.51.100.1")
    assert names.asked == ["a.example"]
    now.value += NAMES_VALID
    assert not allows(one, "198.51.100.1")
    assert names.asked == ["a.example"] * 2


def test_old_addresses_stay_valid_for_a_while_after_a_name_changed() -> None:
    one, names, now = book("a.example", a_example=["192.0.2.1"])
    one.resolve("a.example", 443)
    names.answers["a.example"] = ["192.0.2.2"]
    now.value += ADDRESSES_VALID - 1

    assert allows(one, "192.0.2.2")
    assert allows(one, "192.0.2.1")
    now.value += 1
    assert not allows(one, "192.0.2.1")
    assert allows(one, "192.0.2.2")


def test_resolved_addresses_stay_valid_while_name_resolution_fails() -> None:
    one, names, now = book("a.example", a_example=["192.0.2.1"])
    one.resolve("a.example", 443)
    names.answers.clear()
    now.value += NAMES_VALID

    assert allows(one, "192.0.2.1")
    assert not allows(one, "192.0.2.2")
    with pytest.raises(socket.gaierror):
        one.resolve("a.example", 443)


def test_number_of_remembered_addresses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MAX_ADDRESSES", 3)
    one, names, _ = book("*.example:443")
    for number in range(10):
        names.answers[f"n{number}.example"] = [f"192.0.2.{number}"]
        one.resolve(f"n{number}.example", 443)

    assert [number for number in range(10) if allows(one, f"192.0.2.{number}")] == [7, 8, 9]
    assert len(one._resolved) == 3
