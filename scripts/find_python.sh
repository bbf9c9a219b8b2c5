#!/bin/sh
# Print the path of a Python of at least 3.12, from the PATH or from pyenv. Called by the Makefile.
pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
for python in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 "$pyenv_root"/versions/3.1[2-9]*/bin/python; do
    if [ -n "$python" ] &&
        "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
        "$python" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done
echo "error: no Python 3.12 or later was found; install one, or name one: make setup PYTHON=path/to/python" >&2
exit 1
