"""Check for PySpark and what every task needs before they are imported, and say what to install."""

import re

from djqueue.core.errors import ConfigurationError

from .packages import check_packages

MINIMUM = (4, 1)
"""The first version whose data sources can write Arrow batches of streams."""
NEEDED = "djqueue needs PySpark {}.{} or later".format(*MINIMUM)

try:
    from pyspark import __version__ as installed
except ImportError as error:
    raise ConfigurationError(f"{NEEDED}: pip install djqueue[spark] ({error})") from None

numbers = re.match(r"(\d+)\.(\d+)", installed)
if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM:
    raise ConfigurationError(
        f"{NEEDED}, but {installed} is installed: pip install --upgrade djqueue[spark], on a cluster of that "
        "version of Spark"
    )

check_packages("pyarrow", "msgpack")
