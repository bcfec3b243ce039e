"""Executors by name, and the limits of jobs that run in processes of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from .errors import OptionError
from .messages import shown
from .permissions import Permissions
from .suggest import nearest
from .units import milliseconds, parse_size

INLINE, ISOLATED, SUBPROCESS = "inline", "isolated", "subprocess"
ExecutorName = Literal["inline", "isolated", "subprocess"]
EXECUTORS: tuple[str, ...] = get_args(ExecutorName)
"""In the worker's process; in a process that runs one job of this type after another; in a new process."""
MIB = 1024 * 1024
KERNEL_PERMISSIONS = ("read", "write", "net", "run", "listen")
"""Permissions that the kernel enforces."""
REQUIRE, DEGRADE = "require", "degrade"
SANDBOXES = (REQUIRE, DEGRADE)
"""Refuse jobs whose permissions this system cannot enforce, or accept those that allow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Limits of a job that runs in a process of its own. None stands for no limit."""

    memory: int | None = 512 * MIB
    """Bytes of resident memory of the process and of those that it starts. Checked 20 times a second."""
    cpu: int | None = None
    """Milliseconds of processor time of the process. Checked 20 times a second."""
    processes: int | None = 512
    """Number of processes and threads of the job, with those that its programs start. Checked 20 times a
    second."""
    files: int | None = 1_024
    """Number of files that the process may have open."""
    file_size: int | None = 1024 * MIB
    """Bytes of each file that the process writes."""
    output: int = 64 * 1024
    """Bytes kept of what the job writes to stdout and stderr: half from its beginning, half from its end."""
    jobs: int | None = 100
    """Number of jobs after which a process of `isolated` is replaced."""
    grace: int = 5_000
    """Milliseconds between the steps that end a job: it is asked, interrupted, and killed."""


LIMITS = frozenset(field.name for field in fields(JobLimits))
"""Names of the limits."""
MOST_COUNT = 2**20
"""Maximum of files, processes and jobs: what Linux allows a process to open."""
NO_LIMITS: Mapping[str, Any] = {}
DEFAULT_LIMITS = JobLimits()
SIZES = frozenset({"memory", "file_size", "output"})
DURATIONS = frozenset({"cpu", "grace"})
REQUIRED = frozenset({"output", "grace"})
"""Limits that cannot be None."""
LEAST_MEMORY = 32 * MIB
"""Python itself needs this much."""
LEAST_FILES = 32
MAX_SIZE = 2**53


def parse_executor(value: Any) -> str:
    """Return the name of an executor. Raises OptionError."""
    if not isinstance(value, str) or value not in EXECUTORS:
        hint = nearest(value, EXECUTORS) if isinstance(value, str) else ""
        raise OptionError(f"executor: {value!r} is not one of {', '.join(EXECUTORS)}{hint}")
    return value


def parse_limits(value: Any) -> dict[str, Any]:
    """Return limits by name, in the units of `JobLimits`. Raises OptionError, naming the limit.

    value: A mapping such as `{"memory": "256 MiB", "cpu": 60, "jobs": 1}`; sizes in bytes or as text,
        times in seconds or as timedelta.
    """
    if not isinstance(value, Mapping):
        raise OptionError(f"limits: expected a dict such as {{'memory': '256 MiB'}}; got {value!r}")
    limits: dict[str, Any] = {}
    for name, limit in value.items():
        if name not in LIMITS:
            raise OptionError(f"limits: unknown limit {name!r}{nearest(str(name), LIMITS)}")
        limits[name] = _parse(name, limit)
    return limits


def parse_permissions(value: Any) -> Permissions | None:
    """Return permissions from `Permissions` or a mapping of its fields. Raises OptionError."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = Permissions.from_mapping(value)
    if not isinstance(value, Permissions):
        raise OptionError(f"permissions: expected djqueue.Permissions, got {shown(value)}")
    return value


def parse_unenforced(value: Any) -> tuple[str, ...]:
    """Return the names of permissions that may stay without guarantee. Raises OptionError."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionError(f"allow_unenforced: expected a list of permissions, got {shown(value)}")
    for name in value:
        if name not in KERNEL_PERMISSIONS:
            raise OptionError(
                f"allow_unenforced: {shown(name)} is not one of {', '.join(KERNEL_PERMISSIONS)}"
                f"{nearest(str(name), KERNEL_PERMISSIONS)}"
            )
    return tuple(sorted(set(value)))


def limits_of(*parsed: Mapping[str, Any]) -> JobLimits:
    """Return the limits of some mappings from `parse_limits`; the last one that names a limit counts."""
    limits = DEFAULT_LIMITS
    for values in parsed:
        limits = replace(limits, **values)
    return limits


def _parse(name: str, value: Any) -> int | None:
    where = f"limits: {name}"
    if value is None:
        if name in REQUIRED:
            raise OptionError(f"{where}: cannot be None")
        return None
    if name in SIZES:
        number = parse_size(where, value)
    elif name in DURATIONS:
        number = milliseconds(where, value)
    elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNT:
        raise OptionError(f"{where}: must be a whole number from 1 to {MOST_COUNT:,}; got {value!r}")
    else:
        number = value
    least = {"memory": LEAST_MEMORY, "files": LEAST_FILES, "cpu": 1, "file_size": 0}.get(name, 0)
    if not least <= number <= MAX_SIZE:
        unit = {"memory": " bytes", "file_size": " bytes", "output": " bytes"}.get(name, "")
        raise OptionError(f"{where}: must be from {least:,} to {MAX_SIZE:,}{unit}; got {value!r}")
    return number
