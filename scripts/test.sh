#!/usr/bin/env bash
# Makes the environment if needed and runs all tests that this machine can run: bash scripts/test.sh [pytest arguments]
# `-m gpu` runs those that need a GPU, `-m "not slow"` leaves out the end-to-end runs. Two files run at a time; `-n 8` on a
# machine with a GPU and more cores. See environment.sh for variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
make_environment train,dev
exec "$PYTHON" -m pytest -n 2 --dist loadfile "$@"
