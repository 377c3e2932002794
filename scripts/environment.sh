# Sourced by quickstart.sh and test.sh: finds Python 3.12 or later, makes .venv once and installs the package in it.
#
#   FLA_SAFE_VENV    use this environment, which must hold the package already, instead of .venv (no registry needed)
#   FLA_SAFE_PYTHON  use this Python to make .venv
#
# After `make_environment EXTRAS` the variable PYTHON names the environment's interpreter and PATH starts with its bin.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${FLA_SAFE_VENV:-$REPOSITORY/.venv}
NEEDED_GIB=10

say() { printf '== %s\n' "$*"; }

# One clear line, then out.
fail() {
    printf 'fla-safe: %s\n' "$*" >&2
    exit 1
}

# Runs a command with its output in a log, and says now and then what it is at.
run_logged() {
    local log=$1 seconds=0 pid status=0
    shift
    "$@" >"$log" 2>&1 &
    pid=$!
    # A background job of a script ignores Ctrl-C.
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        if [ $((seconds % 15)) -eq 0 ]; then
            printf '   %4d s  %s\n' "$seconds" "$(tr '\r' '\n' <"$log" | grep -viE '^$|warning' | tail -n 1 | cut -c 1-100)"
        fi
    done
    trap - INT TERM
    wait "$pid" || status=$?
    return "$status"
}

is_usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# Prints the first Python that runs and is 3.12 or 3.13. pyenv's shims exist for versions that are not selected and then
# fail, so every candidate is run, and pyenv's versions are looked up where they stand.
find_python() {
    local candidate
    local pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    if [ -n "${FLA_SAFE_PYTHON:-}" ]; then
        is_usable_python "$FLA_SAFE_PYTHON" || return 1
        printf '%s\n' "$FLA_SAFE_PYTHON"
        return 0
    fi
    for candidate in python3.12 "$pyenv"/3.12*/bin/python3 "$(uv python find --no-python-downloads 3.12 2>/dev/null)" \
        /usr/bin/python3.12 /opt/python3.12/bin/python3 python3.13 "$pyenv"/3.13*/bin/python3 python3; do
        if [ -n "$candidate" ] && is_usable_python "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

environment_stamp() {
    printf '%s\n' "$1" | cat - "$REPOSITORY/pyproject.toml" "$REPOSITORY/scripts/constraints.txt" | sha256sum | cut -d ' ' -f 1
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# Turns pip's log into one line.
explain_pip() {
    local log=$1 missing
    if grep -qE 'Temporary failure in name resolution|Failed to establish a new connection|ConnectionError|Read timed out|ProxyError|SSLError|Network is unreachable' "$log"; then
        fail "no package registry can be reached; set PIP_INDEX_URL to one that can, or FLA_SAFE_VENV to an environment that holds the package (log: $log)"
    fi
    missing=$(sed -nE 's/.*satisfies the requirement ([^ ]+).*from versions: none.*/\1/p' "$log" | head -n 1)
    if [ -n "$missing" ]; then
        fail "no package registry in reach holds $missing; set PIP_INDEX_URL to one that does, or FLA_SAFE_VENV to an environment that holds the package (log: $log)"
    elif grep -qE 'No space left on device|Disk quota exceeded' "$log"; then
        fail "the disk is full: the environment needs $NEEDED_GIB GiB (log: $log)"
    fi
    fail "installation failed: $(grep -E '^ *(ERROR|error):' "$log" | head -n 1 | cut -c 1-300) (log: $log)"
}

# make_environment EXTRAS, for example `make_environment train,dev`.
make_environment() {
    local extras=$1 python stamp log free
    PYTHON=$VENV/bin/python
    export PATH="$VENV/bin:$PATH"
    # An environment of the caller's must not leak into ours.
    unset PYTHONHOME VIRTUAL_ENV

    if [ -n "${FLA_SAFE_VENV:-}" ]; then
        [ -x "$PYTHON" ] || fail "FLA_SAFE_VENV=$FLA_SAFE_VENV has no bin/python"
        "$PYTHON" -c 'import importlib.metadata as m; m.version("fla-safe"); m.version("ms-swift")' >/dev/null 2>&1 ||
            fail "FLA_SAFE_VENV=$FLA_SAFE_VENV does not hold fla-safe and ms-swift; install there: pip install -e '.[train,dev]'"
        return 0
    fi

    if has_gpu; then extras=$extras,gpu; fi
    stamp=$(environment_stamp "$extras")
    if [ -x "$PYTHON" ] && [ "$(cat "$VENV/fla-safe-stamp" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi

    python=$(find_python) ||
        fail "no Python 3.12 or 3.13 found${FLA_SAFE_PYTHON:+ (FLA_SAFE_PYTHON=$FLA_SAFE_PYTHON is not one)}; install one (pyenv install 3.12, or uv python install 3.12) or name it in FLA_SAFE_PYTHON"
    if [ ! -x "$PYTHON" ]; then
        free=$(df -Pk "$REPOSITORY" | awk 'NR == 2 { print int($4 / 1048576) }')
        [ "$free" -ge "$NEEDED_GIB" ] ||
            fail "$free GiB free on the disk of $REPOSITORY; the environment needs $NEEDED_GIB GiB"
        say "making $VENV with $("$python" --version) ($python)"
        "$python" -m venv "$VENV" >/dev/null 2>&1 ||
            fail "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3.12-venv)"
    fi
    rm -f "$VENV/fla-safe-stamp"
    log=$VENV/install.log
    say "installing the package and its dependencies, about 6 GiB (log: $log)"
    run_logged "$log" "$PYTHON" -m pip install --progress-bar off --no-compile --constraint "$REPOSITORY/scripts/constraints.txt" \
        --editable "$REPOSITORY[${extras%,gpu}]" || explain_pip "$log"
    if [ "$extras" != "${extras%,gpu}" ] && ! "$PYTHON" -c 'import transformer_engine.pytorch' >/dev/null 2>&1; then
        say "installing TransformerEngine, part of which is compiled here (log: $log)"
        run_logged "$log" "$PYTHON" -m pip install --progress-bar off --no-compile --no-build-isolation \
            --constraint "$REPOSITORY/scripts/constraints.txt" --editable "$REPOSITORY[$extras]" || explain_pip "$log"
    fi
    printf '%s\n' "$stamp" >"$VENV/fla-safe-stamp"
}
