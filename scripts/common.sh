# shellcheck shell=bash
# What the three launchers share: messages, checks of the five or six words, the environment of the ranks.
# Sourced, never run. Nothing in an argument is ever handed to a shell: commands are arrays.

SCRIPTS="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
ROOT="$(dirname -- "$SCRIPTS")"
ENTRY="$SCRIPTS/train_distributed.py"
USER_ERROR=2

# Print one line on stderr and end with the exit code of a user's mistake.
die() {
    printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
    exit "$USER_ERROR"
}

# Print a value in single-line, shell-quoted form for a message.
quoted() {
    printf '%q' "$1"
}

wants_help() {
    local word
    for word in "$@"; do
        [[ $word == -h || $word == --help ]] && return 0
    done
    return 1
}

# require_whole_number NAME VALUE LARGEST
require_whole_number() {
    local name=$1 value=$2 largest=$3
    [[ $value =~ ^[1-9][0-9]*$ ]] && ((${#value} <= ${#largest})) && ((value <= largest)) && return
    die "$name $(quoted "$value"): expected a whole number from 1 to $largest."
}

# require_name NAME VALUE: only the shape; the training entry knows which names exist.
require_name() {
    [[ $2 =~ ^[A-Za-z0-9][[:graph:]]*$ ]] || die "$1 $(quoted "$2"): expected a name that begins with a letter or digit, without spaces."
}

# check_words "NAME..." WORD...: the leading words' presence and shapes, by their names.
check_words() {
    local -a names
    local name
    read -ra names <<<"$1"
    shift
    (($# >= ${#names[@]})) || die "${#names[@]} arguments are needed (${names[*]}), $# given. --help shows examples."
    for name in "${names[@]}"; do
        case $name in
        model | strategy) require_name "$name" "$1" ;;
        num_nodes | num_gpus | gpus_per_node) require_whole_number "$name" "$1" 1024 ;;
        *) require_whole_number "$name" "$1" 1000000 ;;
        esac
        shift
    done
}

# Use the repository's own environment where it exists: the user need not have activated anything.
use_environment() {
    if [[ -x $ROOT/.venv/bin/python ]]; then
        PATH="$ROOT/.venv/bin:$PATH" # also for ninja, with which DeepSpeed compiles its operators
        export PATH
    fi
    PYTHON=$(type -P python || true)
    DEEPSPEED=$(type -P deepspeed || true)
    [[ -n $PYTHON && -n $DEEPSPEED ]] ||
        die "no Python environment with deepspeed: run 'make setup' in $(quoted "$ROOT")."
    # DeepSpeed's cache of compiled operators is keyed by name only: two environments must not share one.
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$("$PYTHON" -c 'import sys; print(sys.prefix)')/torch_extensions}"
}

# check_configuration MODEL STRATEGY BATCH_SIZE EPOCHS [FLAG...]: the training entry judges names and flags, before any rank starts.
# Sets TRAINING_ARGUMENTS. The '=' form keeps a value from being read as a flag.
check_configuration() {
    TRAINING_ARGUMENTS=("--model-type=$1" "--strategy=$2" --batch-size "$3" --epochs "$4" "${@:5}")
    "$PYTHON" "$ENTRY" --check-config "${TRAINING_ARGUMENTS[@]}" || exit
}

# split_port_flag WORD...: sets PORT (MASTER_PORT, or --master_port / --master-port, which wins) and EXTRA (the other words).
split_port_flag() {
    PORT="${MASTER_PORT:-}"
    EXTRA=()
    while (($#)); do
        case $1 in
        --master_port | --master-port)
            (($# >= 2)) || die "$1 needs a port number from 1 to 65535."
            PORT=$2
            shift
            ;;
        --master_port=* | --master-port=*) PORT=${1#*=} ;;
        *) EXTRA+=("$1") ;;
        esac
        shift
    done
    [[ -z $PORT ]] || require_whole_number "master port" "$PORT" 65535
}

# free_port [PORT]: print PORT if nothing listens there, or any free port if none is given.
free_port() {
    "$PYTHON" - "${1:-0}" <<'PYTHON' || die "port $1 is taken: give another one, or none to have a free one chosen."
import socket, sys

with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", int(sys.argv[1])))
        probe.listen()
    except OSError:
        sys.exit(1)
    print(probe.getsockname()[1])
PYTHON
}

# Under DRY_RUN=1 print the command, as one line that a shell reads back to the same words, and end.
end_if_dry_run() {
    local line
    [[ ${DRY_RUN:-0} == 1 ]] || return 0
    printf -v line '%q ' "$@"
    printf '%s\n' "${line% }"
    exit
}
