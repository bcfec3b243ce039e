"""A sandbox is applied in two stages: to the process that imports code, and to those that run jobs."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.permissions import NOTHING, Permissions
from djqueue.runtime.executors.sandbox import SandboxSelfTestFailedError, apply, paths
from djqueue.runtime.executors.sandbox.apply import Sandbox, self_test
from djqueue.runtime.executors.sandbox.paths import (
    contains,
    existing,
    interpreter_of,
    interpreter_paths,
    loader_of,
)
from djqueue.runtime.executors.sandbox.syscalls import prctl
from tests.runtime.executors.sandbox.attempts import USER, needs_sandbox
from tests.runtime.executors.sandbox.harness import (
    NOBODY,
    SupervisedChannel,
    inside,
    run,
    shared_directory,
)

pytestmark = needs_sandbox


@pytest.fixture
def project() -> Iterator[Path]:
    """A project with settings, an app below it, and a directory for media."""
    with shared_directory() as path:
        for name in ("app", "media", "tmp", "tmp/one"):
            (path / name).mkdir()
            (path / name).chmod(0o777)
        (path / "app" / "code.py").write_text("VALUE = 1")
        for name in (*SECRETS, "settings/base.py", "manage.py", "app/data/plain.json"):
            (path / name).parent.mkdir(exist_ok=True)
            if "link" in name:
                (path / name).symlink_to(path / ".env")
            else:
                (path / name).write_text("SECRET")
        for name in ("plain.json", "db.sqlite3"):
            (path / "media" / name).write_text("VALUE = 1")
        yield path


def is_readable(path: Path) -> bool:
    try:
        path.read_text()
    except PermissionError:
        return False
    return True


def of_project(path: Path, permissions: Permissions = NOTHING) -> Sandbox:
    return Sandbox(permissions, {}, [str(path / "app")], project_paths=[str(path)])


# The two stages.


SECRETS = (
    *(
        ".env",
        ".env.production",
        "prod.env",
        ".git/config",
        "app/.env",
        "app/db.sqlite3",
        "app/db.sqlite3-wal",
    ),
    *("db.sqlite3", "app/data/key.pem", "app/client_secret.json", "app/link", "settings/link.py"),
)
"""Files of the project that no code may read, from the first import on."""


@USER
def test_only_the_template_process_can_read_the_modules_of_the_project(project: Path, user: str) -> None:
    files = ["settings/base.py", "manage.py", "app/code.py", "app/data/plain.json"]

    def read() -> tuple[list[bool], list[bool]]:
        before = [is_readable(project / name) for name in files]
        sandbox.stage_two()
        return before, [is_readable(project / name) for name in files]

    sandbox = of_project(project)
    before, after = run(read, user=user, prepare=sandbox.stage_one).value
    assert (before, after) == ([True, True, True, True], [False, False, True, True])


@USER
@pytest.mark.parametrize("name", SECRETS)
def test_secrets_of_the_project_are_not_readable_from_the_first_import_on(
    project: Path, user: str, name: str
) -> None:
    def read() -> tuple[bool, bool]:
        before = is_readable(project / name)
        sandbox.stage_two()
        return before, is_readable(project / name)

    sandbox = of_project(project)
    assert run(read, user=user, prepare=sandbox.stage_one).value == (False, False)


def test_listed_files_are_readable_only_while_modules_are_imported(project: Path) -> None:
    def read() -> list[bool]:
        before = [is_readable(project / "media" / name) for name in ("plain.json", "db.sqlite3")]
        sandbox.stage_two()
        return [*before, is_readable(project / "media" / "plain.json")]

    sandbox = Sandbox(NOTHING, {}, project_paths=[str(project)], import_paths=[str(project / "media")])
    assert run(read, prepare=sandbox.stage_one).value == [True, False, False]


def test_directory_with_too_many_files_is_refused_by_name(project: Path, monkeypatch) -> None:
    monkeypatch.setattr(paths, "MOST_ENTRIES", 5)

    result = run(of_project(project).stage_one)

    assert (result.error, str(project) in result.text) == ("SandboxError", True)


@USER
def test_template_process_has_all_permissions_of_its_jobs(project: Path, user: str) -> None:
    sandbox = of_project(project)

    def attempt(action: Callable[[], object]) -> int | None:
        return run(action, user=user, prepare=sandbox.stage_one).errno

    assert attempt(lambda: Path("/etc/passwd").read_text()) == errno.EACCES
    assert attempt(lambda: (project / ".env").write_text("x")) == errno.EACCES
    assert attempt(lambda: socket.socket()) == errno.EPERM
    assert attempt(lambda: os.execv("/bin/true", ["true"])) == errno.EPERM
    assert attempt(lambda: os.kill(os.getppid(), 0)) == errno.EPERM


@USER
def test_only_the_template_process_can_fork(user: str) -> None:
    def fork() -> tuple[int, int]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            sandbox.stage_two()
            try:
                os.fork()
            except PermissionError as error:
                os.write(writer, bytes([error.errno]))
            os._exit(7)
        return os.waitpid(pid, 0)[1] >> 8, os.read(reader, 1)[0]

    sandbox = Sandbox(NOTHING, {})
    assert run(fork, user=user, prepare=sandbox.stage_one).value == (7, errno.EPERM)


@USER
def test_job_process_cannot_signal_the_template_or_other_job_processes(user: str) -> None:
    def signal_others() -> list[int]:
        codes: list[int] = []
        waiting, release = os.pipe()
        sibling = os.fork()
        if sibling == 0:
            sandbox.stage_two()
            os.read(waiting, 1)
            os._exit(0)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            sandbox.stage_two()
            for other in (os.getppid(), sibling):
                try:
                    os.kill(other, 0)
                    os.write(writer, b"\0")
                except PermissionError as error:
                    os.write(writer, bytes([error.errno]))
            os._exit(0)
        os.waitpid(pid, 0)
        codes += os.read(reader, 2)
        os.kill(sibling, 0)
        os.write(release, b"x")
        os.waitpid(sibling, 0)
        return codes

    granted = Permissions(run=True)
    sandbox = Sandbox(granted, {})
    assert run(signal_others, user=user, prepare=sandbox.stage_one).value == [errno.EPERM] * 2


@USER
def test_job_processes_share_the_broker_of_the_template_process(user: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect_in_children() -> list[int]:
            pids = []
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        sandbox.stage_two()
                        socket.create_connection(("127.0.0.1", port)).close()
                        try:
                            socket.create_connection(("127.0.0.1", 1))
                        except PermissionError:
                            code = 0
                    finally:
                        os._exit(code)
                pids.append(pid)
            return [os.waitpid(pid, 0)[1] for pid in pids]

        permissions = Permissions(net=[f"127.0.0.1:{port}"])
        sandbox = Sandbox(permissions, {})
        with SupervisedChannel(permissions) as channel:
            result = run(connect_in_children, user=user, prepare=lambda: sandbox.stage_one(channel.theirs))
    assert result.value == [0, 0, 0]


@USER
def test_each_job_process_has_its_own_temporary_directory(project: Path, user: str) -> None:
    if user == "nobody":
        os.chown(project / "tmp" / "one", NOBODY, NOBODY)
    granted = Permissions(write=["{job_tmp}"])
    sandbox = Sandbox(granted, {"job_tmp": str(project / "tmp")})

    def use() -> tuple[bool, bool]:
        (project / "tmp" / "before").write_text("x")
        sandbox.stage_two({"job_tmp": str(project / "tmp" / "one")})
        (project / "tmp" / "one" / "mine").write_text("x")
        try:
            (project / "tmp" / "others").write_text("x")
        except PermissionError:
            return True, True
        return True, False

    assert run(use, user=user, prepare=sandbox.stage_one).value == (True, True)


@USER
def test_resource_limits_are_fixed_by_the_second_stage(user: str) -> None:
    def limit() -> tuple[tuple[int, int], bool]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        prctl(1, signal.SIGKILL)
        sandbox.stage_two()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
        except (OSError, ValueError):
            return resource.getrlimit(resource.RLIMIT_NOFILE), True
        return resource.getrlimit(resource.RLIMIT_NOFILE), False

    sandbox = Sandbox(NOTHING, {})
    assert run(limit, user=user, prepare=sandbox.stage_one).value == ((64, 64), True)


def test_both_stages_reject_a_process_with_threads() -> None:
    def with_thread(stage: Callable[[], None]) -> None:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        try:
            stage()
        finally:
            release.set()
            thread.join()

    sandbox = Sandbox(NOTHING, {})
    for result in (
        run(lambda: with_thread(sandbox.stage_one)),
        run(lambda: with_thread(sandbox.stage_two), prepare=sandbox.stage_one),
    ):
        assert result.error == "SandboxError"
        assert "a sandbox must be applied before" in result.text


# Paths.


@pytest.mark.parametrize("name", ["read", "write", "run"])
def test_missing_path_is_an_error(name: str) -> None:
    result = run(Sandbox(Permissions.from_mapping({name: ["/nowhere/x"]}), {}).stage_one)

    assert result.error == "PermissionPathError"
    assert result.text == f"{name}: /nowhere/x can't be granted: No such file or directory"


@pytest.mark.parametrize("target", ["/", "/proc", "/proc/self", "/etc", "/dev", "/sys"])
def test_link_to_a_forbidden_directory_is_an_error(project: Path, target: str) -> None:
    (project / "link").symlink_to(target)
    result = run(Sandbox(Permissions(read=[project / "link"]), {}).stage_one)

    assert result.error == "PermissionPathError"
    assert "can't be granted, because it leads to /" in result.text


@pytest.mark.parametrize("name", ["read", "write"])
def test_permission_for_a_parent_of_the_project_is_an_error(project: Path, name: str) -> None:
    for path in (project, project.parent):
        granted = Permissions.from_mapping({name: [str(path)]})
        result = run(of_project(project, granted).stage_one)
        assert result.error == "PermissionPathError"
        assert result.text == f"{name}: {path} can't be granted, because it contains {project}"


def test_code_paths_can_be_read_but_not_written(project: Path) -> None:
    for path in (project / "app", Path(sys.prefix)):
        result = run(Sandbox(Permissions(write=[path]), {}, [str(project / "app")]).stage_one)
        assert result.error == "PermissionPathError"
        assert "because it contains" in result.text
    assert run(of_project(project, Permissions(read=[project / "app"])).stage_one).is_ok


def test_directory_beside_the_code_can_be_written(project: Path) -> None:
    sandbox = of_project(project, Permissions(write=[project / "media"]))

    def write() -> str:
        sandbox.stage_two()
        (project / "media" / "x").write_text("x")
        return (project / "media" / "x").read_text()

    assert run(write, prepare=sandbox.stage_one).value == "x"


def test_path_placeholder_without_a_value_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"write: \{job_tmp\} has no value here"):
        Sandbox(Permissions(write=["{job_tmp}"]), {})


@pytest.mark.parametrize(
    ("directory", "path", "expected"),
    [
        ("/a", "/a", True),
        ("/a", "/a/b", True),
        ("/a", "/ab", False),
        ("/a/b", "/a", False),
        ("/", "/a", True),
    ],
)
def test_directory_contains_the_paths_below_it(directory: str, path: str, expected: bool) -> None:
    assert contains(directory, path) is expected


def test_interpreter_reads_its_own_files_but_not_the_whole_prefix() -> None:
    found = interpreter_paths()

    assert existing(found) == found
    assert len(set(found)) == len(found)
    assert any(contains(os.path.realpath(path), os.path.realpath(os.__file__)) for path in found)
    assert {sys.prefix, sys.base_prefix, "/", "/usr", "/etc"} & set(found) == set()


# Programs.


def test_script_requires_its_interpreter_in_the_run_list(project: Path) -> None:
    script = project / "media" / "script"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)

    result = run(Sandbox(Permissions(run=[script]), {}).stage_one)
    assert result.error == "PermissionPathError"
    assert result.text == f"run: {script} is a script; add its interpreter /bin/sh"
    granted = Permissions(run=[script, "/bin/sh"])
    started = inside(lambda: subprocess.run([script], capture_output=True, check=True).stdout, granted)
    assert started.value == b"hello\n"


def test_directory_in_the_run_list_is_an_error(project: Path) -> None:
    result = run(Sandbox(Permissions(run=[project / "app"]), {}).stage_one)

    assert result.text == f"run: {project / 'app'} is a directory; list its programs"


def test_loader_of_a_program_is_found(project: Path) -> None:
    loader = loader_of("/bin/true")
    assert loader is None or Path(loader).exists()
    assert interpreter_of("/bin/true") is None
    (project / "script").write_text("#! /usr/bin/env python3\n")
    assert interpreter_of(str(project / "script")) == "/usr/bin/env"
    assert loader_of(str(project / "script")) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"MZ", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x01" + b"\xff" * 100],
)
def test_file_that_is_not_a_program_is_an_error(project: Path, content: bytes) -> None:
    (project / "media" / "x").write_bytes(content)

    result = run(Sandbox(Permissions(run=[project / "media" / "x"]), {}).stage_one)
    assert result.error == "PermissionPathError"
    assert "is neither a 64-bit program nor a script" in result.text or "is not a valid" in result.text


# The self-test.


@pytest.mark.parametrize(
    "permissions",
    [
        NOTHING,
        Permissions(read=True),
        Permissions(write=True),
        Permissions(net=True),
        Permissions(run=True),
        Permissions(listen=True),
        Permissions(net=["127.0.0.1"], listen=[0]),
        Permissions(read=True, write=True, net=True, run=True, listen=True),
    ],
    ids=Permissions.describe,
)
@USER
def test_self_test_passes_with_any_permissions(permissions: Permissions, user: str) -> None:
    assert inside(lambda: None, permissions, user=user).is_ok


def test_self_test_can_be_repeated_in_a_sandbox() -> None:
    sandbox = Sandbox(NOTHING, {})

    assert run(sandbox.self_test).text == "the sandbox has not been applied to this process"
    assert run(sandbox.self_test, prepare=sandbox.stage_one).is_ok


def test_self_test_outside_a_sandbox_names_every_allowed_action() -> None:
    def test_here() -> None:
        self_test(NOTHING, may_fork=False)

    result = run(test_here)
    assert result.error == "SandboxSelfTestFailedError"
    for name in ("owner", "clone3", "root directory", "UDP", "connecting", "program", "fork", "parent"):
        assert name in result.text


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("_restrict", "the root directory"),
        ("filter_for", "connecting, a UDP socket, starting a program, fork"),
    ],
)
def test_self_test_detects_a_layer_without_effect(
    left_out: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoFilter:
        def install(self, **_: object) -> int:
            return 0

    if left_out == "_restrict":
        monkeypatch.setattr(Sandbox, "_restrict", lambda *_, **__: None)
    else:
        monkeypatch.setattr(apply, "filter_for", lambda *_, **__: NoFilter())
        monkeypatch.setattr(
            apply, "self_test", lambda _, may_fork: may_fork or self_test(NOTHING, may_fork=False)
        )
    sandbox = Sandbox(NOTHING, {})

    def both() -> None:
        sandbox.stage_one()
        sandbox.stage_two()

    result = run(both)
    assert result.error == SandboxSelfTestFailedError.__name__
    assert named in result.text


def test_self_test_leaves_no_files_or_descriptors() -> None:
    before = set(os.listdir("/"))
    assert run(lambda: self_test(NOTHING, may_fork=False)).error == "SandboxSelfTestFailedError"
    assert set(os.listdir("/")) == before
