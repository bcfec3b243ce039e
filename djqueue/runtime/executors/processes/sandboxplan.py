"""The sandbox of a template process, as its worker chooses it: paths, environment and databases."""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings as django_settings

from djqueue.conf import get_settings, has_django
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.logs import Log
from djqueue.core.permissions import Permissions
from djqueue.runtime.executors.sandbox.apply import missing_layers
from djqueue.runtime.executors.sandbox.paths import contains, interpreter_paths, may_be_secret, real_path

logger = Log("djqueue.worker")

VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "DJANGO_SETTINGS_MODULE")
"""Environment variables that a sandboxed process always has, besides LC_*."""
PREFIX = "djqueue-jobs-"
"""Beginning of the name of a parent of temporary directories; the worker's process id follows."""
MOVED = f"{PREFIX}moved-"
"""Beginning of the names of directories that are being removed."""
PRIVATE = 0o700
PACKAGE = str(Path(__file__).parents[3])
"""Folder of djqueue itself."""
NO_HOME = "/nonexistent"
"""Home directory of a process that has no temporary one."""
PORTS = {"postgresql": 5432, "postgis": 5432, "mysql": 3306, "oracle": 1521}
"""Default ports of Django's database engines, by the last part of their names."""
SOCKETS = "/var/run/postgresql"
"""Directory of PostgreSQL's sockets, if no host is given."""


def new_parent() -> str:
    """Make a parent of temporary directories, and remove those of workers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not owner.isdecimal() or os.path.exists(f"/proc/{owner}"):
            continue
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            remove_tree(str(path))
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")


def remove_tree(path: str) -> None:
    """Remove a temporary directory, whatever modes and depth its job has given to what is in it.

    Links are removed, and never followed. An error is logged.
    """
    try:
        root = _opened(path)
        try:
            numbers = count()
            while directories := _remove_files(root):
                for name in directories:
                    opened = _opened(name, root)
                    try:
                        for inner in _remove_files(opened):
                            # One level up, so that no path and no stack grows with the depth of the tree.
                            os.close(_opened(inner, opened))
                            os.rename(inner, f"{MOVED}{next(numbers)}", src_dir_fd=opened, dst_dir_fd=root)
                    finally:
                        os.close(opened)
                    os.rmdir(name, dir_fd=root)
        finally:
            os.close(root)
        os.rmdir(path)
    except FileNotFoundError:
        return  # Something else has removed it.
    except OSError as error:
        logger.warning("Could not remove the temporary directory %s: %s", path, error)


def _opened(path: str, directory: int | None = None) -> int:
    """Open a directory, and no link, after making it accessible."""
    found = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{found}", PRIVATE)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)


def _remove_files(directory: int) -> list[str]:
    """Remove everything in an open directory but its directories, and return their names."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in found if is_directory]


class SandboxPlan(NamedTuple):
    """Everything that a template process needs to apply its sandbox."""

    permissions: Permissions
    """Permissions of the job type, with the servers of its databases."""
    unenforced: tuple[str, ...]
    """Names of the permissions that may stay without guarantee."""
    missing: tuple[str, ...]
    """Names of those that this system cannot guarantee."""
    values: Mapping[str, str]
    """Paths by template."""
    code_paths: tuple[str, ...]
    project_paths: tuple[str, ...]
    import_paths: tuple[str, ...]
    """Files and directories that are readable only while the handlers are imported."""

    @property
    def uses_directory(self) -> bool:
        """Whether each process has a temporary directory."""
        return "job_tmp" in self.permissions.templates

    @property
    def is_supervised(self) -> bool:
        """Whether the worker makes the connections of the processes."""
        return isinstance(self.permissions.net, tuple)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the template process."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in VARIABLES or name.startswith("LC_") or self.permissions.allows_env(name)
        }
        return {"HOME": NO_HOME, **kept}

    def as_dict(self, directory: str) -> dict[str, Any]:
        """Return what the template process receives. `directory`: parent of the temporary directories."""
        databases = list(django_settings.DATABASES) if has_django() else []
        return {
            "permissions": self.permissions.as_dict(),
            "unenforced": list(self.unenforced),
            "values": {**self.values, "job_tmp": directory} if directory else dict(self.values),
            "code_paths": list(self.code_paths),
            "project_paths": list(self.project_paths),
            "import_paths": list(self.import_paths),
            "databases": [alias for alias in databases if self.permissions.allows_db(alias)],
        }


def plan_for(permissions: Permissions, unenforced: tuple[str, ...]) -> SandboxPlan:
    """Return the sandbox of some permissions. Raises ConfigurationError if they name what does not exist."""
    values = _values()
    try:
        permissions.resolved({"job_tmp": "/tmp/djqueue", **values})  # noqa: S108 - only checked
        permissions.check_databases(django_settings.DATABASES if has_django() else ())
    except OptionError as error:
        raise ConfigurationError(f"permissions: {error}") from error
    project = _project_paths()
    _check_paths(permissions, values, project)
    missing = {name for layer in missing_layers(permissions) for name in layer.permissions}
    return SandboxPlan(
        permissions.with_net(*_database_servers(permissions)),
        unenforced,
        tuple(sorted(missing)),
        values,
        _code_paths(project),
        project,
        _import_paths(),
    )


def _check_paths(permissions: Permissions, values: Mapping[str, str], project: tuple[str, ...]) -> None:
    """Raise ConfigurationError for a path that does not exist or cannot be granted."""
    placeholder = tempfile.gettempdir()
    resolved = permissions.resolved({**values, "job_tmp": placeholder})
    for name, protected in (("read", project), ("write", project), ("run", ())):
        paths = getattr(resolved, name)
        for path in () if isinstance(paths, bool) else paths:
            if not path.startswith(placeholder):
                real_path(name, path, protected=protected)


def _values() -> dict[str, str]:
    if not has_django():
        return {}
    roots = {name: str(getattr(django_settings, name, "") or "") for name in ("MEDIA_ROOT", "STATIC_ROOT")}
    return {name: path for name, path in roots.items() if path.startswith("/")}


def _project_paths() -> tuple[str, ...]:
    """Return the directories that imports read: those of the project, which may hold secrets."""
    paths = [str(Path(entry or ".").resolve()) for entry in sys.path]
    base = getattr(django_settings, "BASE_DIR", None) if has_django() else None
    if base is not None:
        paths.append(str(Path(base).resolve()))
    inside = tuple(map(os.path.realpath, interpreter_paths()))
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if os.path.isdir(path) and not any(contains(directory, path) for directory in inside)
    )


def _import_paths() -> tuple[str, ...]:
    """Return the files that the settings list. Raises ConfigurationError for one that may hold secrets."""
    paths = get_settings().sandbox_imports
    for path in paths:
        if not os.path.exists(path):
            raise ConfigurationError(f"SANDBOX_IMPORTS: {path} does not exist")
        if may_be_secret(path):
            raise ConfigurationError(
                f"SANDBOX_IMPORTS: {path} may hold secrets; pass the values that the settings need as "
                "environment variables, and list these in Permissions(env=[...])"
            )
    return paths


def _code_paths(project: tuple[str, ...]) -> tuple[str, ...]:
    """Return the directories of installed apps, unless they contain the project itself."""
    paths = [PACKAGE]
    if has_django():
        paths += [config.path for config in apps.get_app_configs()]
    real = dict.fromkeys(map(os.path.realpath, paths))
    return tuple(path for path in real if not any(contains(path, directory) for directory in project))


def _database_servers(permissions: Permissions) -> list[str]:
    """Return the entries of `net` for the databases that a job may use."""
    servers = []
    for alias, config in django_settings.DATABASES.items() if has_django() else ():
        engine = str(config.get("ENGINE", "")).rpartition(".")[2]
        if not permissions.allows_db(alias) or engine not in PORTS:
            continue
        host, port = str(config.get("HOST") or ""), config.get("PORT") or PORTS[engine]
        if host.startswith("/") or not host:
            servers.append(f"unix:{host or SOCKETS}/.s.PGSQL.{port}")
        else:
            servers.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return servers
