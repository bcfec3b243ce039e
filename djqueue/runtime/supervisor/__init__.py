"""The supervisor of `runworkers --processes`: child processes that it starts, restarts and stops."""

from .children import Child as Child
from .children import Role as Role
from .supervisor import Limits as Limits
from .supervisor import Supervisor as Supervisor
