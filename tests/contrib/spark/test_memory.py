"""The memory of a task in addition to that of reading its rows, for several kinds of rows."""

import json
import subprocess
import sys

import pytest

LIMIT = 64 * 1024 * 1024
ROWS = {
    "large": "({'n': ['x' * 900_000] * 18} for _ in range(12))",
    "of many queues": """
        ({'n': ['y' * 40] * 10_000, 'q': [f'q{i % 2_000}' for i in range(10_000)]} for _ in range(20))
    """,
    "small": "({'n': ['z' * 40] * 10_000} for _ in range(20))",
    "with large options": """
        ({'n': range(200), 'h': ['{"a": "%s%d"}' % ('h' * 7_000, i) for i in range(200)]} for _ in range(6))
    """,
}
OPTIONS = {"of many queues": {"queueColumn": "q"}, "with large options": {"headersColumn": "h"}}
TASK = """
import json, resource, sys
import pyarrow
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write

options, rows, alone = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "alone"
batches = (pyarrow.record_batch(columns) for columns in eval(rows.strip()))
write = Write(WriteOptions.read(options), ["n", "q", "h"])
warm = pyarrow.record_batch({"n": ["w"], "q": ["q0"], "h": ["{}"]})
write.run_task("0.0", [warm])
if alone:
    count = sum(batch.num_rows for batch in batches)
else:
    count = write.run_task("1.1", batches).rows
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]))
"""


def run(url, kind, mode):
    given = {"url": url, "job": "shop.send", "includeColumns": "n", **OPTIONS.get(kind, {})}
    if "queueColumn" not in given:
        given["queue"] = "emails"
    command = [sys.executable, "-c", TASK, json.dumps(given), ROWS[kind], mode]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["large", "of many queues", "small", "with large options"])
def test_memory_of_a_task_is_limited(redis_url, kind):
    count, alone = run(redis_url, kind, "alone")
    written, whole = run(redis_url, kind, "write")

    assert written == count
    assert whole - alone <= LIMIT, f"{(whole - alone) / 1024**2:.0f} MiB above reading the rows"
