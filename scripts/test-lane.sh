#!/bin/sh
# Runs the tests of what depends on the versions of Python, Django and other packages, in an environment of
# its own: test-lane.sh FOLDER PYTHON-VERSION PIP-INSTALL-ARGUMENTS... -- [pytest's arguments]
# TESTS="..." names the tests instead.
# Without that Python it says so and passes.
set -eu

lane=$1
version=$2
shift 2

if ! PYTHON=$(PYTHON='' scripts/find-python.sh "$version"); then
    while [ "$1" != -- ]; do shift; done
    echo "test-lane: no Python $version here, so $lane is not tested."
    exit 0
fi
export PYTHON

install=''
while [ "$1" != -- ]; do
    install="$install '$1'"
    shift
done
shift

# Django's tables, checks and codecs; producers; each storage; what is built on other packages.
tests="tests/test_alone.py tests/test_checks.py tests/test_conf.py tests/test_models.py tests/codecs tests/client
    tests/testing tests/everywhere/test_twins.py tests/everywhere/test_transitions.py
    tests/storage/redis/test_location.py tests/schedules"
extras=redis,uvloop
for extra in celery tasks; do
    [ ! -d "tests/contrib/$extra" ] || tests="$tests tests/contrib/$extra" extras="$extras,$extra"
done
tests=${TESTS:-$tests}

stamp=$lane/.installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ hatch_build.py -nt "$stamp" ] ||
    [ scripts/oldest.txt -nt "$stamp" ] || [ scripts/test-lane.sh -nt "$stamp" ]; then
    eval "scripts/make-venv.sh \"\$lane\" -e '.[$extras]' $install \
        hypothesis 'psycopg[binary]' 'pytest>=9' pytest-asyncio pytest-django pytest-randomly pytest-xdist"
    touch "$stamp"
fi
"$lane/bin/python" -c 'from importlib.metadata import version
import sys
names = ["Django", "kombu", "msgpack", "cronsim", "redis", "django-redis", "hiredis"]
print("test-lane:", "Python", sys.version.split()[0] + ",", ", ".join(f"{n} {version(n)}" for n in names))'

# shellcheck disable=SC2086
"$lane/bin/python" -m tools.lanes run versions -- "$@" $tests
