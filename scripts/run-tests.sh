#!/bin/sh
# Runs tests with what is given, by the Python named first: run-tests.sh PYTHON [pytest's arguments]
# What fails in the crowd is run again, one test after the other, and must pass then: a machine that is
# too busy for a test is told from a test that fails. Both are printed, so that no flake goes unseen.
set -u

python=$1
shift
"$python" -m pytest "$@"
status=$?
[ "$status" -eq 1 ] || exit "$status"

failed=$("$python" -m pytest -n 0 --last-failed --last-failed-no-failures none --collect-only -q "$@" 2>/dev/null |
    grep -c '::' || true)
if [ "$failed" -eq 0 ] || [ "$failed" -gt "${MOST_AGAIN:-20}" ]; then
    exit "$status"
fi
echo "run-tests: $failed failed; they are run again, alone."
"$python" -m pytest "$@" -n 0 --last-failed --last-failed-no-failures none || exit $?
echo "run-tests: all $failed passed alone. They depend on other tests, or on chance, and want mending."
