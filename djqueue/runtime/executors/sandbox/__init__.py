"""The sandbox of a process: permissions that the kernel enforces with Landlock and seccomp, and their errors.

It knows nothing of jobs. The process that applies it to itself uses `apply`, and the process outside that
makes its connections uses `broker`.
"""

from typing import ClassVar

from djqueue.core.errors import ConfigurationError, DjqueueError


class SandboxError(DjqueueError):
    """A sandbox could not be set up."""

    code = "sandbox"


class SandboxUnavailableError(SandboxError):
    """This system cannot enforce the permissions."""

    code = "sandbox_unavailable"
    exit_code: ClassVar[int] = 78
    """Exit code of a worker that cannot enforce the permissions of its job types: EX_CONFIG."""


class SandboxSelfTestFailedError(SandboxError):
    """The sandbox allowed an action that it must refuse."""

    code = "sandbox_self_test_failed"


class PermissionPathError(SandboxError, ConfigurationError):
    """A path of the permissions does not exist or can't be granted."""

    code = "permission_path"
