"""The supervisor of `runworkers`: child processes that it starts, restarts and stops."""

from .children import ChildProcess as ChildProcess
from .children import ProcessRole as ProcessRole
from .supervisor import ProcessLimits as ProcessLimits
from .supervisor import Supervisor as Supervisor
