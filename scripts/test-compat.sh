#!/bin/sh
# Runs the fast tests on the other line of Django than the main environment's: test-compat.sh VENV
# Before that, two short lanes test what depends on versions: scripts/test-lane.sh.
# VENV on Python 3.11 has Django 5.2, so this takes Python 3.12+ and its Django 6.1; and the other
# way round. Its workers run on uvloop, those of the main environment on asyncio's loop. Without a
# second interpreter it says so and passes.
set -eu

venv=$1
shift
# The short lanes first: what breaks on old versions shows in two minutes.
failed=0 # A lane that fails does not keep the others from running.
scripts/test-lane.sh .venv-oldest 3.11 -c scripts/oldest.txt -- "$@" || failed=1
TESTS="tests/test_alone.py tests/test_checks.py tests/test_models.py tests/contrib/tasks tests/testing" \
    scripts/test-lane.sh .venv-django60 3.12 'Django>=6.0,<6.1' -- "$@" || failed=1

if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
    other=.venv-django6 wanted="3.13 3.12 3.14" django="Django>=6.1,<6.2"
else
    other=.venv-django5 wanted="3.11 3.12 3.13" django="Django>=5.2,<5.3"
fi

# shellcheck disable=SC2086
if ! PYTHON=$(PYTHON='' scripts/find-python.sh $wanted); then
    echo "test-compat: no Python of $wanted here, so $django is not tested."
    exit $failed
fi
export PYTHON

stamp=$other/.installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ hatch_build.py -nt "$stamp" ]; then
    scripts/make-venv.sh "$other" -e '.[test,uvloop]' "$django"
    [ ! -e demo_project/requirements.txt ] ||
        scripts/make-venv.sh "$other" --no-deps -r demo_project/requirements.txt
    touch "$stamp"
fi
"$other/bin/python" -c 'import sys, django
print(f"test-compat: Python {sys.version.split()[0]}, Django {django.__version__}")'
# What depends on Django or the loop: pages, settings, models, commands. The first lane has run the rest.
"$other/bin/python" -m tools.lanes run versions -- --ignore tests/dashboard/browser "$@" \
    tests/test_alone.py tests/test_checks.py tests/test_conf.py tests/test_models.py tests/test_invalid_settings.py \
    tests/admin tests/client tests/contrib/tasks tests/dashboard tests/management tests/runtime/test_loops.py || failed=1
exit $failed
