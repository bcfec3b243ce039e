"""Actions that no layer can prevent: if one of these tests fails, the documentation is wrong."""

import ctypes
import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox.paths import loader_of
from tests.runtime.executors.sandbox.attempts import needs_sandbox
from tests.runtime.executors.sandbox.harness import inside, shared_directory

pytestmark = needs_sandbox


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_directory() as path:
        (path / "out").mkdir()
        (path / "secret").write_text("secret")
        (path / "link").symlink_to("secret")
        yield path


def test_existence_and_size_of_files_are_visible(place: Path) -> None:
    assert inside(lambda: (place / "secret").stat().st_size, NOTHING).value == 6
    assert inside(lambda: (place / "nothing").exists(), NOTHING).value is False
    assert inside(lambda: os.access(place / "secret", os.R_OK), NOTHING).value is True


def test_target_of_a_symbolic_link_is_visible(place: Path) -> None:
    assert inside(lambda: os.readlink(place / "link"), NOTHING).value == "secret"


def test_write_permission_allows_changing_modes_and_times_of_all_files_of_the_user(place: Path) -> None:
    """Landlock does not know these calls, and a filter sees no paths."""

    def change() -> None:
        os.chmod(place / "secret", 0o666)
        os.utime(place / "secret", (1, 1))

    assert inside(change, Permissions(write=[place / "out"])).is_ok
    assert not inside(change, Permissions(read=[place])).is_ok


def test_working_directory_can_be_changed_to_any_path(place: Path) -> None:
    assert inside(lambda: os.chdir(place), NOTHING).is_ok


def test_permitted_loader_starts_every_readable_program() -> None:
    loader = loader_of("/bin/true")
    if loader is None:
        pytest.skip("programs of this system have no loader")

    def start() -> int:
        return subprocess.run([loader, "/bin/sleep", "0"]).returncode

    assert inside(start, Permissions(run=["/bin/true"], read=["/bin/sleep"])).value == 0
    assert inside(start, Permissions(run=["/bin/true"])).value != 0


def test_list_of_ports_does_not_prevent_listening_on_a_random_port() -> None:
    def listen() -> int:
        with socket.socket() as server:
            server.listen()
            return int(server.getsockname()[1])

    assert inside(listen, Permissions(listen=[1])).value > 1


def test_list_of_ports_applies_only_to_tcp_if_every_host_is_allowed() -> None:
    def bind() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("127.0.0.1", 0))
            return int(server.getsockname()[1])

    assert inside(bind, Permissions(net=True, listen=[1])).is_ok
    assert not inside(bind, Permissions(net=True)).is_ok


def test_read_permission_for_all_files_includes_command_lines_of_processes() -> None:
    def read() -> bytes:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    assert inside(read, Permissions(read=True)).is_ok
    assert not inside(read, NOTHING).is_ok


def test_machine_code_can_be_executed() -> None:
    def execute() -> None:
        with mmap.mmap(-1, 4_096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as memory:
            memory.write(b"x")

    assert inside(execute, NOTHING).is_ok
    assert inside(lambda: ctypes.CDLL(None).getpid(), NOTHING).value > 0


def test_machine_and_parent_process_identifiers_are_visible() -> None:
    assert inside(os.uname, NOTHING).is_ok
    assert inside(os.getppid, NOTHING).value == os.getpid()
    assert inside(lambda: os.getsid(os.getppid()), NOTHING).is_ok
    assert inside(os.getloadavg, NOTHING).is_ok


def test_open_file_stays_usable(place: Path) -> None:
    """A process inherits only what its parent leaves open, so parents must close everything else."""
    with open(place / "secret") as file:
        assert inside(file.read, NOTHING).value == "secret"
