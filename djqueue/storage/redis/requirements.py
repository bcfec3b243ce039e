"""Check for redis-py before it is imported, and say what to install."""

from importlib.util import find_spec

from djqueue.core.errors import ConfigurationError

if find_spec("redis") is None:
    raise ConfigurationError("the Redis storage requires more packages: pip install djqueue[redis]")
