"""Check for redis-py and hiredis before they are imported, and say what to install."""

from importlib.util import find_spec

from djqueue.core.errors import ConfigurationError

if find_spec("redis") is None or find_spec("hiredis") is None:
    raise ConfigurationError("the Redis storage requires more packages: pip install djqueue[redis]")
