#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [--full] [--exhaustive] [pytest arguments ...].
set -euo pipefail
ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
source "$ROOT/scripts/env.sh"

usage() {
    cat <<'HELP'
Usage: ./run_tests.sh [--full] [--exhaustive] [pytest arguments ...]

Runs the quick suite; --full runs the linter, the type checker and the wide matrices too, --exhaustive all that and
every combination of the parity matrix. Other arguments go to pytest, for example: ./run_tests.sh tests/unit -k schedule

Without an active environment that this project is installed in, makes .venv beside the script and installs into it.
HELP
}
full=""
for argument in "$@"; do
    case $argument in
    -h | --help) usage && exit 0 ;;
    --full | --exhaustive) full=yes ;;
    esac
done

find_environment test
cd "$ROOT"
failed=""
if [ -n "$full" ]; then
    "$PYTHON" -m ruff check . || failed+=" ruff"
    "$PYTHON" -m mypy || failed+=" mypy"
fi
"$PYTHON" -m pytest "$@" || failed+=" pytest"
[ -z "$failed" ] || die "failed:$failed"
