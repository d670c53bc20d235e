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

# require_whole_number NAME VALUE LARGEST [SMALLEST]: the smallest is 1 unless given.
require_whole_number() {
    local name=$1 value=$2 largest=$3 smallest=${4:-1}
    [[ $value =~ ^(0|[1-9][0-9]*)$ ]] && ((${#value} <= ${#largest})) && ((value >= smallest && value <= largest)) && return
    die "$name $(quoted "$value"): expected a whole number from $smallest to $largest."
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

# take_flag NAME EXPECTED WORD...: takes a flag of the launcher's own out of the words; --a_b and --a-b are the same.
# Sets TAKEN to the values given ("--flag value" or "--flag=value") and EXTRA to the other words.
take_flag() {
    local name=$1 expected=$2
    shift 2
    TAKEN=()
    EXTRA=()
    while (($#)); do
        case ${1//_/-} in
        "$name")
            (($# >= 2)) || die "$1 needs $expected."
            TAKEN+=("$2")
            shift
            ;;
        "$name"=*) TAKEN+=("${1#*=}") ;;
        *) EXTRA+=("$1") ;;
        esac
        shift
    done
}

# split_port_flag WORD...: sets PORT (MASTER_PORT, or --master_port / --master-port, which wins) and EXTRA (the other words).
split_port_flag() {
    take_flag --master-port "a port number from 1 to 65535" "$@"
    PORT="${MASTER_PORT:-}"
    ((${#TAKEN[@]} == 0)) || PORT=${TAKEN[-1]}
    [[ -z $PORT ]] || require_whole_number "master port" "$PORT" 65535
}

# split_restarts_flag WORD...: sets MAX_RESTARTS (the variable, or --max-restarts, which wins) and EXTRA (the other words).
split_restarts_flag() {
    take_flag --max-restarts "a whole number from 0 to 1000" "$@"
    MAX_RESTARTS=${MAX_RESTARTS:-3}
    ((${#TAKEN[@]} == 0)) || MAX_RESTARTS=${TAKEN[-1]}
    require_whole_number "max restarts" "$MAX_RESTARTS" 1000 0
    export MAX_RESTARTS
}

# Sets LAUNCH_WITH: the name by which launch.py knows LAUNCHER and RENDEZVOUS.
# shellcheck disable=SC2034 # those who source this file read it
check_launcher() {
    local launcher=${LAUNCHER:-direct} rendezvous=${RENDEZVOUS:-static}
    [[ $launcher =~ ^(direct|deepspeed|torchrun)$ ]] ||
        die "LAUNCHER $(quoted "$launcher"): expected direct, deepspeed or torchrun."
    [[ $rendezvous =~ ^(static|c10d)$ ]] || die "RENDEZVOUS $(quoted "$rendezvous"): expected static or c10d."
    [[ $rendezvous == static || $launcher == torchrun ]] || die "RENDEZVOUS c10d needs LAUNCHER=torchrun."
    LAUNCH_WITH=$launcher
    [[ $rendezvous == static ]] || LAUNCH_WITH=torchrun-c10d
}

# take_switch NAME WORD...: takes a flag without a value out of the words, as take_flag does one with a value.
# Sets GIVEN (1 if it is among them, else 0) and EXTRA (the other words).
take_switch() {
    local name=$1
    shift
    GIVEN=0
    EXTRA=()
    while (($#)); do
        if [[ ${1//_/-} == "$name" ]]; then
            GIVEN=1
        else
            EXTRA+=("$1")
        fi
        shift
    done
}

# split_preflight_flag WORD...: sets PREFLIGHT (1 where --preflight is among the words, else 0) and EXTRA (the other words).
split_preflight_flag() {
    take_switch --preflight "$@"
    PREFLIGHT=$GIVEN
}

# preflight WORD...: where --preflight was given, let the doctor look before the start, with these words and
# TRAINING_ARGUMENTS; ends with 1 where something is wrong. Not under DRY_RUN=1.
preflight() {
    [[ $PREFLIGHT == 1 && ${DRY_RUN:-0} != 1 ]] || return 0
    "$PYTHON" "$SCRIPTS/doctor.py" "$@" -- "${TRAINING_ARGUMENTS[@]}" || exit
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
