#!/usr/bin/env bash
# Train on the GPUs of this machine, or on CPU ranks where it has none: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

MAX_CPU_RANKS_PER_CORE=8

usage() {
    cat <<'HELP'
Train an image classifier on the GPUs of this machine (on CPU ranks where it has none).

    bash launch_distributed.sh <model> <strategy> <num_gpus> <batch_size> <epochs> [flags]

  model       mobilenet, efficientnet, vgg, ... or timm:<any timm model>
  strategy    ddp, fsdp_stage2 or fsdp_stage3: how the training state is sharded
  num_gpus    GPUs to use; without any GPU, as many CPU ranks
  batch_size  images per GPU
  epochs      passes over the training data
  flags       any flag of train_distributed.py ('python scripts/train_distributed.py --help' lists all),
              --master_port N, and --max-restarts N: how often in a row a failed training is started again
              without having saved a newer checkpoint in between (default 3, 0 to 1000),
              and --preflight: let scripts/doctor.py look at machine and data first, and stop where something is wrong

Examples:
    bash launch_distributed.sh mobilenet ddp 4 16 50
    bash launch_distributed.sh efficientnet fsdp_stage2 8 8 100 --data ~/photos --learning-rate 0.0005
    DRY_RUN=1 bash launch_distributed.sh mobilenet ddp 2 16 1

Environment variables:
    DRY_RUN=1              print the command as one line instead of running it
    LAUNCHER               what starts the ranks: direct (default; seconds faster), deepspeed or torchrun
    MASTER_PORT            port the ranks meet on (default: a free one)
    CUDA_VISIBLE_DEVICES   use only these GPUs, for example 2,3
    OMP_NUM_THREADS        CPU threads per rank (default: cores / ranks)
    TORCH_EXTENSIONS_DIR   where DeepSpeed keeps compiled operators (default: inside the environment)
    MAX_RESTARTS           as --max-restarts, which wins
    STOP_TIMEOUT           seconds the ranks have to save and stop after a signal (default 300)

Ctrl-C, SIGTERM and SIGUSR1 reach all ranks at once; they save a checkpoint and stop. A second Ctrl-C ends them without.
A rank that dies or hangs ends the others, and training goes on from its newest good checkpoint: at once the first
time, then after 2, 4, 8, ... 30 seconds. One line says why.
Exit codes:
    0                 training is done
    1                 --preflight found something wrong
    2                 a mistake in what was given; one line says which
    65                the loss or the gradients were not finite, too many steps in a row
    74                no checkpoint could be written for 10 minutes
    78                training is done, and has diverged: its last epoch's losses are far beyond guessing or not finite
    130, 138, 143     stopped by Ctrl-C, SIGUSR1, SIGTERM; --resume goes on
  and when the restarts are used up, that of the last failure:
    124               a rank hung
    128 + n           signal n ended a rank: 137 for kill -9 and for want of memory
    any other         the rank's own
HELP
}

# Sets GPU_IDS to the GPUs that may be used: those of CUDA_VISIBLE_DEVICES where it is set, else all of the machine.
find_gpus() {
    local listing="" id
    local -a visible=()
    type -P nvidia-smi >/dev/null && listing=$(nvidia-smi -L 2>/dev/null || true)
    mapfile -t GPU_IDS < <(sed -n 's/^GPU \([0-9]*\):.*/\1/p' <<<"$listing")
    MACHINE_GPUS=" ${GPU_IDS[*]} "
    ((${#GPU_IDS[@]})) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] || return 0
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES//[[:space:]]/}"
    GPU_IDS=()
    for id in "${visible[@]}"; do
        [[ $id != -1 ]] || break # CUDA's own way of saying "none from here on"
        GPU_IDS+=("$id")
    done
}

# Sets ENVIRONMENT: the variables the command needs, as the words of env.
build_environment() {
    local ranks=$1 cores threads
    cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')
    threads=$((cores > ranks ? cores / ranks : 1))
    # More threads than cores is not a little slower: 2 ranks with 2 threads on 2 cores took 15 times as long.
    ENVIRONMENT=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}" "TORCH_EXTENSIONS_DIR=$TORCH_EXTENSIONS_DIR")
    if ((${#GPU_IDS[@]} == 0)); then
        ((ranks <= cores * MAX_CPU_RANKS_PER_CORE)) ||
            die "no GPU found, and $ranks CPU ranks are too many for $cores cores: at most $((cores * MAX_CPU_RANKS_PER_CORE))."
        ENVIRONMENT+=("DS_ACCELERATOR=cpu")
        printf 'no GPU found: running %d CPU ranks over gloo on %d cores\n' "$ranks" "$cores" >&2
    fi
}

# Each sets COMMAND for RANKS ranks on this machine.
deepspeed_command() {
    local ranks=$1 ids id
    local -a place=(--num_gpus "$ranks")
    if ((${#GPU_IDS[@]})) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        for id in "${GPU_IDS[@]}"; do
            [[ $MACHINE_GPUS == *" $id "* ]] ||
                die "CUDA_VISIBLE_DEVICES $(quoted "$id"): expected GPU numbers out of$MACHINE_GPUS(or LAUNCHER=direct)."
        done
        # deepspeed ignores CUDA_VISIBLE_DEVICES beside --num_gpus.
        printf -v ids '%s,' "${GPU_IDS[@]:0:ranks}"
        place=(--include "localhost:${ids%,}")
        ENVIRONMENT=(-u CUDA_VISIBLE_DEVICES "${ENVIRONMENT[@]}")
    fi
    # --hostfile: a file of the machine's own at deepspeed's default place must not turn this into a multi-node run.
    COMMAND=("$DEEPSPEED" "${place[@]}" --hostfile /dev/null --master_port "$PORT" --log_level critical)
}

direct_command() {
    COMMAND=("$PYTHON" "$ROOT/launch/local_ranks.py" --nproc_per_node "$1" --master_port "$PORT")
}

torchrun_command() {
    COMMAND=("$PYTHON" "$ROOT/launch/torchrun.py" --nproc_per_node "$1" --master_addr 127.0.0.1 --master_port "$PORT")
}

main() {
    if wants_help "$@"; then
        usage
        exit
    fi
    check_words "model strategy num_gpus batch_size epochs" "$@"
    local model=$1 strategy=$2 num_gpus=$3 batch_size=$4 epochs=$5
    local launcher=${LAUNCHER:-direct}
    [[ $launcher =~ ^(direct|deepspeed|torchrun)$ ]] ||
        die "LAUNCHER $(quoted "$launcher"): expected direct, deepspeed or torchrun."
    export STOP_TIMEOUT=${STOP_TIMEOUT:-300}
    require_whole_number STOP_TIMEOUT "$STOP_TIMEOUT" 86400
    split_port_flag "${@:6}"
    split_restarts_flag "${EXTRA[@]}"
    split_preflight_flag "${EXTRA[@]}"
    use_environment
    find_gpus
    ((${#GPU_IDS[@]} == 0 || num_gpus <= ${#GPU_IDS[@]})) ||
        die "$num_gpus GPUs asked for, ${#GPU_IDS[@]} present: ask for at most ${#GPU_IDS[@]}."
    check_configuration "$model" "$strategy" "$batch_size" "$epochs" "${EXTRA[@]}"
    preflight --here --gpus-per-node "$num_gpus" --port "${PORT:-0}"
    local given_port=$PORT
    PORT=$(free_port "$PORT")
    build_environment "$num_gpus"
    "${launcher}_command" "$num_gpus"
    COMMAND=(env "${ENVIRONMENT[@]}" "${COMMAND[@]}" "$ENTRY" "${TRAINING_ARGUMENTS[@]}")
    end_if_dry_run "${COMMAND[@]}"
    export CHOSEN_PORT=$PORT # a restart takes another one
    [[ -z $given_port ]] || CHOSEN_PORT=
    exec "$PYTHON" "$ROOT/launch/supervisor.py" "${COMMAND[@]}"
}

main "$@"
