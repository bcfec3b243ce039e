"""Inside a sandbox, names are resolved by the supervisor."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from djqueue.core.permissions import Permissions
from djqueue.runtime.executors.sandbox.addresses import use_supervisor
from tests.runtime.executors.sandbox.attempts import needs_sandbox
from tests.runtime.executors.sandbox.harness import inside

ANSWERS = {
    "a.example": [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")],
    "localhost": [(socket.AF_INET, "127.0.0.1")],
    "xn--mnchen-3ya.example": [(socket.AF_INET, "192.0.2.2")],
    "empty.example": [],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int | None]]]:
    questions: list[tuple[str, int | None]] = []

    def ask(name: str, port: int | None) -> list[tuple[int, str]]:
        questions.append((name, port))
        if name not in ANSWERS:
            raise PermissionError(f"the permission net does not list {name!r}")
        return ANSWERS[name]

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        monkeypatch.setattr(socket, name, getattr(socket, name))
    use_supervisor(ask)
    return questions


Asked = list[tuple[str, int | None]]


def test_getaddrinfo_returns_the_addresses_found_by_the_broker(asked: Asked) -> None:
    assert socket.getaddrinfo("a.example", 443) == [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 443)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 443, 0, 0)),
    ]
    assert asked == [("a.example", 443)]


@pytest.mark.parametrize(
    ("host", "port", "question"),
    [
        (b"a.example", "443", ("a.example", 443)),
        ("a.example", b"443", ("a.example", 443)),
        ("a.example", "https", ("a.example", 443)),
        ("a.example", None, ("a.example", None)),
        ("münchen.example", 80, ("xn--mnchen-3ya.example", 80)),
    ],
)
def test_getaddrinfo_accepts_all_forms_of_names_and_ports(
    asked: Asked, host: Any, port: Any, question: Any
) -> None:
    assert socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    assert asked == [question]


def test_getaddrinfo_respects_the_address_family(asked: Asked) -> None:
    found = socket.getaddrinfo("a.example", 80, socket.AF_INET6, socket.SOCK_STREAM)

    assert [entry[4][0] for entry in found] == ["2001:db8::1"]


@pytest.mark.parametrize("host", ["192.0.2.9", "::1", None, "", b"127.0.0.1"])
def test_ip_addresses_and_localhost_need_no_request_to_the_broker(asked: Asked, host: Any) -> None:
    assert socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
    assert asked == []


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: socket.getaddrinfo("empty.example", 80), socket.EAI_NONAME),
        (lambda: socket.getaddrinfo("localhost", 80, socket.AF_INET6), socket.EAI_NONAME),
        (lambda: socket.getaddrinfo("a.example", 80, flags=socket.AI_NUMERICHOST), socket.EAI_NONAME),
        (lambda: socket.getaddrinfo("a" * 70 + ".ü", 80), socket.EAI_NONAME),
        (lambda: socket.getaddrinfo(b"\xff", 80), socket.EAI_NONAME),
        (lambda: socket.getaddrinfo("a.example", "no-such-service"), socket.EAI_SERVICE),
    ],
)
def test_invalid_name_raises_an_error_of_name_resolution(
    asked: Asked, call: Callable[[], Any], code: int
) -> None:
    with pytest.raises(socket.gaierror) as caught:
        call()
    assert caught.value.errno == code


def test_unlisted_name_is_denied(asked: Asked) -> None:
    with pytest.raises(PermissionError, match=r"does not list 'secret\.example'"):
        socket.create_connection(("secret.example", 443))


def test_older_resolver_functions_use_the_broker(asked: Asked) -> None:
    assert socket.gethostbyname("a.example") == "192.0.2.1"
    assert socket.gethostbyname_ex("a.example") == ("a.example", [], ["192.0.2.1"])
    assert [name for name, _ in asked] == ["a.example"] * 2


def test_event_loop_resolver_uses_the_broker(asked: Asked) -> None:
    async def resolve() -> list[Any]:
        return await asyncio.get_running_loop().getaddrinfo("a.example", 443, family=socket.AF_INET)

    assert asyncio.run(resolve())[0][4] == ("192.0.2.1", 443)
    assert asked == [("a.example", 443)]


@needs_sandbox
def test_names_are_resolved_inside_a_sandbox(asked: Asked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect() -> list[Any]:
            socket.create_connection(("localhost", port)).close()
            return socket.getaddrinfo("a.example", 443)

        found = inside(connect, Permissions(net=[f"localhost:{port}"]))
    assert [entry[4][0] for entry in found.value] == ["192.0.2.1", "2001:db8::1"]
