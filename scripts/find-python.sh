#!/bin/sh
# Prints a Python interpreter that can make a virtual environment: $PYTHON when it is set, else the
# first suitable one of the versions given (default: 3.13 3.12 3.11 3.14), on PATH or from pyenv.
set -eu

suitable() {
    "$1" -c '
import sys, ensurepip, sqlite3, ssl, venv
sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    suitable "$PYTHON" && { command -v "$PYTHON"; exit 0; }
    echo "PYTHON=$PYTHON is no Python 3.11 or later with ensurepip, sqlite3, ssl and venv" >&2
    exit 1
fi

[ $# -gt 0 ] || set -- 3.13 3.12 3.11 3.14
for version in "$@"; do
    for candidate in "python$version" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version"; do
        suitable "$candidate" && { command -v "$candidate"; exit 0; }
    done
done
exit 1
