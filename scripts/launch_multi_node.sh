#!/usr/bin/env bash
# Train on the GPUs of several machines through DeepSpeed's pdsh launcher: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
Start a training on several machines, listed in a hostfile, through the deepspeed launcher.

    bash launch_multi_node.sh <model> <strategy> <num_nodes> <gpus_per_node> <batch_size> <epochs> [flags]

  num_nodes, gpus_per_node   machines to use, from the top of the hostfile, and GPUs on each
  batch_size                 images per GPU
  flags                      any flag of train_distributed.py, and --master_port N
  (model, strategy, epochs: as launch_distributed.sh --help says)

Examples:
    bash launch_multi_node.sh ensemble fsdp_stage3 4 8 8 100
    DRY_RUN=1 HOSTFILE=lab.txt bash launch_multi_node.sh vgg fsdp_stage3 2 8 8 100

Environment variables:
    HOSTFILE      lines of 'name slots=N' (default: hostfile.txt here, else beside the scripts folder;
                  hostfile_example.txt shows one)
    DRY_RUN=1     print the command as one line instead of running it
    MASTER_PORT   port on the first machine the ranks meet on (default: 29500)

It needs pdsh here, ssh without password to every machine, and this folder with its environment at the same
path on each. It checks the arguments and the hostfile; it does not yet check the machines.
Exit code: 2 for a mistake in what was given (one line says which), otherwise deepspeed's.
HELP
}

main() {
    if wants_help "$@"; then
        usage
        exit
    fi
    check_words "model strategy num_nodes gpus_per_node batch_size epochs" "$@"
    local model=$1 strategy=$2 num_nodes=$3 gpus_per_node=$4 batch_size=$5 epochs=$6 word
    # pdsh hands the words to a shell on every machine, so nothing that a shell could read as more than a word may pass.
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] ||
            die "$(quoted "$word"): on several machines an argument may hold letters, digits and _./:=,@%+- only."
    done
    split_port_flag "${@:7}"
    use_environment
    local hostfile=${HOSTFILE:-}
    if [[ -z $hostfile ]]; then
        hostfile=hostfile.txt
        [[ -f $hostfile ]] || hostfile=$ROOT/hostfile.txt
    fi
    PYTHONPATH=$ROOT "$PYTHON" -m training.hostfile --nodes "$num_nodes" --slots "$gpus_per_node" -- "$hostfile" || exit
    check_configuration "$model" "$strategy" "$batch_size" "$epochs" "${EXTRA[@]}"
    local -a command=("$DEEPSPEED" "--hostfile=$hostfile" --num_nodes "$num_nodes" --num_gpus "$gpus_per_node"
        --master_port "${PORT:-29500}" "$ENTRY" "${TRAINING_ARGUMENTS[@]}")
    end_if_dry_run "${command[@]}"
    exec "${command[@]}"
}

main "$@"
