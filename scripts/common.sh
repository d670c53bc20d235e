# shellcheck shell=bash
# What the three launchers share: they print their help, find the environment, and hand over to Python, which checks
# all arguments (zerovision/launch/arguments.py). Sourced, never run.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

# hand_over PROGRAM SCRIPT ARGUMENT...: run a program of launch/ in place of this shell; -h or --help anywhere prints
# the script's usage; --help all at the end is the program's, which lists the flags of the training.
# The repository's own environment is used if it exists: the user need not have activated anything.
hand_over() {
    local program=$ROOT/zerovision/launch/$1 word python
    shift
    for word in "$@"; do
        if [[ $word == -h || ($word == --help && "${*: -2}" != "--help all") ]]; then
            exec cat "$ROOT/zerovision/launch/usage/${1%.sh}.txt"
        fi
    done
    if [[ -x $ROOT/.venv/bin/python ]]; then
        export PATH="$ROOT/.venv/bin:$PATH" # also for ninja, with which DeepSpeed compiles its operators
    fi
    if ! python=$(type -P python) || ! type -P deepspeed >/dev/null; then
        printf "error: no Python environment with deepspeed: run 'make setup' in %q.\n" "$ROOT" >&2
        exit 2
    fi
    exec "$python" "$program" "$@"
}
