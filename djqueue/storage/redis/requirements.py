"""Imported before redis-py, to say what to install if it is missing."""

from importlib.util import find_spec

from djqueue.core.errors import ConfigurationError

if find_spec("redis") is None:
    raise ConfigurationError("the Redis storage requires more packages: pip install djqueue[redis]")
