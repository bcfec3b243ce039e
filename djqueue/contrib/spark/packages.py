"""Check for packages that a process of Spark may lack, and say where and how to install them."""

import socket
import sys
from importlib.util import find_spec

from djqueue.core.errors import ConfigurationError


def check_packages(*names: str) -> None:
    """Raise ConfigurationError if this process lacks one of these packages."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{sys.executable} on {socket.gethostname()} lacks {' and '.join(missing)}, which djqueue needs "
            f"on the driver and every executor: pip install {' '.join(missing)} there, or ship an "
            "environment that has djqueue[spark] with --archives, and set PYSPARK_PYTHON to its Python"
        )
