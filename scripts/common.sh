# shellcheck shell=bash
# Shared by the three launchers, which print their help, find the environment, and hand over to Python, which checks
# all arguments (zerovision/launch/arguments.py). This file is sourced, never executed.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

# hand_over PROGRAM SCRIPT ARGUMENT...: replace this shell with a program in launch/. -h or --help anywhere prints the
# script's usage; --help all at the end is passed to the program, which lists the trainer's flags.
# The repository's own environment is used if it exists; the user need not activate it.
hand_over() {
    local program=$ROOT/zerovision/launch/$1 word python
    shift
    for word in "$@"; do
        if [[ $word == -h || ($word == --help && "${*: -2}" != "--help all") ]]; then
            exec cat "$ROOT/zerovision/launch/usage/${1%.sh}.txt"
        fi
    done
    if [[ -x $ROOT/.venv/bin/python ]]; then
        export PATH="$ROOT/.venv/bin:$PATH" # also for ninja, which compiles DeepSpeed's operators
    fi
    if ! python=$(type -P python) || ! type -P deepspeed >/dev/null; then
        printf "error: no Python environment with deepspeed: run 'make setup' in %q.\n" "$ROOT" >&2
        exit 2
    fi
    exec "$python" "$program" "$@"
}
