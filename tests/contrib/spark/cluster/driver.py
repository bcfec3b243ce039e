"""Run loads in a driver process that tests can kill. The command line has the loads as JSON.

Each load has `options`, and either `rows`, the end of the range to write, or `source` and `checkpoint` of a
stream of Parquet files. The options of the last one may make the driver die.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.contrib.spark.cluster.faulty import FaultySource
from tests.contrib.spark.sessions import LOCAL, session

PARTITIONS = 3


def main() -> None:
    folder, loads = Path(sys.argv[1]), json.loads(sys.argv[2])
    assert os.getpgrp() == os.getpid(), "what is killed is a process group of its own"
    with session(LOCAL, folder) as spark:
        spark.dataSource.register(FaultySource)
        for load in loads:
            run(spark, load)


def run(spark: Any, load: dict[str, Any]) -> None:
    options = {**load["options"], "group": os.getpgrp()}
    if "rows" in load:
        rows = spark.range(0, load["rows"], 1, PARTITIONS).toDF("n")
        rows.write.format("faulty").options(**options).mode("append").save()
        return
    stream = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).parquet(load["source"])
    writer = stream.writeStream.format("faulty").options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", load["checkpoint"]).start()
    assert query.awaitTermination(120)


if __name__ == "__main__":
    main()
