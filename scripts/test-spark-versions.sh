#!/bin/sh
# Runs a few tests of the Spark connector on minor versions of PySpark, each in an environment of its own:
# test-spark-versions.sh [VERSION...]. `make test-spark` runs all of them on the newest version.
set -eu

tests="tests/contrib/spark/test_plugin.py tests/contrib/spark/test_column_types.py tests/contrib/spark/test_session.py
    tests/contrib/spark/test_odd_session.py tests/contrib/spark/test_read_session.py"

for version in ${*:-4.1 4.2 4.3}; do
    lane=.venv-spark-$version stamp=.venv-spark-$version/.installed
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ hatch_build.py -nt "$stamp" ]; then
        scripts/make-venv.sh "$lane" -e '.[spark,test]' "pyspark[sql]==$version.*"
        touch "$stamp"
    fi
    "$lane/bin/python" -c 'import sys, pyspark
print(f"test-spark-versions: Python {sys.version.split()[0]}, PySpark {pyspark.__version__}")'
    # shellcheck disable=SC2086
    "$lane/bin/python" -m tools.lanes run spark-versions -- -n 0 $tests
done
