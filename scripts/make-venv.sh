#!/bin/sh
# Makes a virtual environment and installs into it: make-venv.sh FOLDER PIP-INSTALL-ARGUMENTS...
# One that is there and works is kept, whatever its version.
set -eu

venv=$1
shift
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if ! python=$(scripts/find-python.sh); then
        echo "No Python 3.11 or later with the venv module was found." >&2
        echo "Install one (Debian: python3 python3-venv), or say PYTHON=/path/to/python." >&2
        exit 1
    fi
    echo "Making $venv with $python"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
