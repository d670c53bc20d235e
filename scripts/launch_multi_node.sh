#!/usr/bin/env bash
# Train on the GPUs of several machines, listed in a hostfile, over ssh: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
Train an image classifier on the GPUs of several machines (on CPU ranks where they have none).

    bash launch_multi_node.sh <model> <strategy> <num_nodes> <gpus_per_node> <batch_size> <epochs> [flags]

  num_nodes, gpus_per_node   machines to use, from the top of the hostfile, and GPUs on each
  batch_size                 images per GPU
  flags                      any flag of train_distributed.py, --master_port N, --max-restarts N (default 3),
                             --hostfile FILE: lines of 'name slots=N' (default: hostfile.txt here, else beside the
                             scripts folder; hostfile_example.txt shows one), and
                             --min-nodes N: after a failure go on with at least N machines (default: all);
                             the global batch stays, through accumulation;
                             --allow-differences: train although versions or code differ between the machines; and
                             --preflight: let the doctor examine machines, data and network first, and stop with 1
                             where something is wrong
  (model, strategy, epochs: as launch_distributed.sh --help says)

Examples:
    bash launch_multi_node.sh ensemble fsdp_stage3 4 8 8 100
    bash launch_multi_node.sh efficientnet ddp 4 8 16 90 --data /shared/flowers --min-nodes 2
    DRY_RUN=1 bash launch_multi_node.sh vgg fsdp_stage3 2 8 8 100 --hostfile lab.txt

Environment variables:
    HOSTFILE        as --hostfile
    LAUNCHER        what starts the ranks of a machine: direct (default), deepspeed or torchrun
    RENDEZVOUS      how torchrun's ranks meet: static (default) or c10d
    FORWARD_ENV     names of more variables that the ranks need, with commas; NCCL_*, GLOO_*, TORCH*, OMP_*, CUDA_*,
                    PYTHON*, HF_* and some others reach them anyway
    DRY_RUN=1       print the command as one line instead of running it
    MASTER_PORT     port on the first machine that the ranks meet on (default: a free one)
    START_TIMEOUT   seconds within which the machines must answer (default 300)
    MAX_RESTARTS, STOP_TIMEOUT, OMP_NUM_THREADS, TORCH_EXTENSIONS_DIR   as launch_distributed.sh --help says

It needs ssh without a password to every machine, this folder with its environment at the same path on each, and a
--log-dir that all share. 'python scripts/doctor.py --hostfile FILE' says what is missing.
Signals, restarts and exit codes are those of launch_distributed.sh, over all machines, and
    1     --preflight found something wrong
    69    too few machines could be reached, or one was lost and the restarts are used up
HELP
}

# find_hosts NODES SLOTS [FILE...]: sets HOSTS, the names of the machines to use, with commas; the files are those that
# --hostfile named, and the last one wins.
find_hosts() {
    local hostfile=${HOSTFILE:-}
    if (($# > 2)); then
        hostfile=${*: -1}
        [[ ${HOSTFILE:-$hostfile} == "$hostfile" ]] ||
            die "--hostfile $(quoted "$hostfile"), but HOSTFILE $(quoted "$HOSTFILE"): two files, give one of them."
    elif [[ -z $hostfile ]]; then
        hostfile=hostfile.txt
        [[ -f $hostfile ]] || hostfile=$ROOT/hostfile.txt
    fi
    HOSTS=$(PYTHONPATH=$ROOT "$PYTHON" -m launch.hostfile --nodes "$1" --slots "$2" -- "$hostfile") || exit
}

main() {
    if wants_help "$@"; then
        usage
        exit
    fi
    check_words "model strategy num_nodes gpus_per_node batch_size epochs" "$@"
    local model=$1 strategy=$2 num_nodes=$3 gpus_per_node=$4 batch_size=$5 epochs=$6
    local stop_timeout=${STOP_TIMEOUT:-300} start_timeout=${START_TIMEOUT:-300}
    check_launcher
    [[ ${REMOTE_SHELL:-ssh} == ssh ]] ||
        die "REMOTE_SHELL $(quoted "$REMOTE_SHELL"): that choice is gone, ssh reaches the machines. Unset REMOTE_SHELL."
    require_whole_number STOP_TIMEOUT "$stop_timeout" 86400
    require_whole_number START_TIMEOUT "$start_timeout" 86400
    [[ ${FORWARD_ENV:-} =~ ^[A-Za-z0-9_,]*$ ]] || die "FORWARD_ENV $(quoted "$FORWARD_ENV"): expected names with commas."
    split_port_flag "${@:7}"
    split_restarts_flag "${EXTRA[@]}"
    split_preflight_flag "${EXTRA[@]}"
    take_flag --min-nodes "a whole number from 1 to $num_nodes" "${EXTRA[@]}"
    local min_nodes=$num_nodes
    ((${#TAKEN[@]} == 0)) || min_nodes=${TAKEN[-1]}
    require_whole_number "min nodes" "$min_nodes" "$num_nodes"
    take_switch --allow-differences "${EXTRA[@]}"
    local -a differences=()
    ((GIVEN == 0)) || differences=(--allow-differences)
    take_flag --hostfile "a file of lines 'name slots=N'" "${EXTRA[@]}"
    use_environment
    find_hosts "$num_nodes" "$gpus_per_node" "${TAKEN[@]}"
    check_configuration "$model" "$strategy" "$batch_size" "$epochs" "${EXTRA[@]}"
    preflight --hosts "$HOSTS" --gpus-per-node "$gpus_per_node" --port "${PORT:-0}"
    local -a command=("$PYTHON" "$ROOT/launch/cluster/cluster_run.py" --remote-shell ssh --hosts "$HOSTS"
        --ranks-per-node "$gpus_per_node" --min-nodes "$min_nodes" --port "${PORT:-0}" --launcher "$LAUNCH_WITH"
        --max-restarts "$MAX_RESTARTS" --stop-timeout "$stop_timeout" --start-timeout "$start_timeout"
        "--forward=${FORWARD_ENV:-}" "${differences[@]}" -- "${TRAINING_ARGUMENTS[@]}")
    end_if_dry_run "${command[@]}"
    type -P ssh >/dev/null || die "ssh is not installed here: install OpenSSH's client."
    exec "${command[@]}"
}

main "$@"
