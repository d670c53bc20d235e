#!/usr/bin/env bash
#SBATCH --job-name=slurm_distributed
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# sbatch resolves a relative --output from the folder it is typed in, and would lose the job where that has no logs/.
# So the job opens logs/slurm_distributed_<job>.out itself, at the same place from the root and from scripts/.
#SBATCH --output=/dev/null
set -euo pipefail

# In a job $0 is Slurm's private copy of this script: the repository is where sbatch was typed, or one above.
find_scripts() {
    local folder
    for folder in "$(dirname -- "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}" "${SLURM_SUBMIT_DIR:-.}/scripts"; do
        [[ ! -f $folder/common.sh ]] || {
            printf '%s' "$folder"
            return
        }
    done
}

SCRIPTS_FOUND=$(find_scripts)
if [[ -n ${SLURM_JOB_ID:-} && $(readlink "/proc/$$/fd/1") == /dev/null ]]; then
    # Without the repository the message below still has to be found: in the folder where sbatch was typed.
    LOG_FOLDER=${SCRIPTS_FOUND:+$SCRIPTS_FOUND/../logs}
    LOG_FOLDER=${LOG_FOLDER:-$SLURM_SUBMIT_DIR}
    mkdir -p -- "$LOG_FOLDER"
    exec >>"$LOG_FOLDER/slurm_distributed_$SLURM_JOB_ID.out" 2>&1
fi
if [[ -z $SCRIPTS_FOUND ]]; then
    printf 'slurm_distributed.sh: submit it from the root of the repository or from scripts/\n' >&2
    exit 2
fi
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$SCRIPTS_FOUND/common.sh"

usage() {
    cat <<'HELP'
Train in a Slurm job. Submit it from the root of the repository or from scripts/:

    sbatch slurm_distributed.sh <model> <strategy> <num_gpus> <batch_size> <epochs> [flags]

  num_gpus   GPUs on each node of the job; the job asks for 1 node and 8 GPUs unless sbatch is told otherwise
  batch_size images per GPU
  flags      any flag of train_distributed.py, and --master_port N
  (model, strategy, epochs: as launch_distributed.sh --help says)

Examples:
    sbatch slurm_distributed.sh mobilenet ddp 8 16 100
    sbatch --nodes=4 --gpus-per-node=4 slurm_distributed.sh vgg fsdp_stage3 4 8 100
    DRY_RUN=1 bash slurm_distributed.sh mobilenet ddp 8 16 100

The output goes to logs/slurm_distributed_<job>.out unless sbatch is given --output.
Environment variables:
    DRY_RUN=1     print the command as one line instead of running it
    MASTER_PORT   port on the first node the ranks meet on (default: from the job's number)

It checks the arguments; it does not yet act on Slurm's warning signals or requeue the job.
Exit code: 2 for a mistake in what was given (one line says which), otherwise srun's.
HELP
}

main() {
    if wants_help "$@"; then
        usage
        exit
    fi
    check_words "model strategy num_gpus batch_size epochs" "$@"
    local model=$1 strategy=$2 num_gpus=$3 batch_size=$4 epochs=$5
    [[ -n ${SLURM_JOB_ID:-} || ${DRY_RUN:-0} == 1 ]] || die "not in a Slurm job: submit it with sbatch, or set DRY_RUN=1."
    split_port_flag "${@:6}"
    use_environment
    check_configuration "$model" "$strategy" "$batch_size" "$epochs" "${EXTRA[@]}"
    local head=localhost job=${SLURM_JOB_ID:-0} nodes=${SLURM_JOB_NUM_NODES:-1}
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    fi
    # Two jobs may share a node: the port follows from the job's number.
    PORT=${PORT:-$((20000 + job % 10000))}
    local -a command=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1
        "$PYTHON" "$SCRIPTS/torchrun.py" --nnodes "$nodes" --nproc_per_node "$num_gpus"
        --rdzv_backend c10d --rdzv_endpoint "$head:$PORT" --rdzv_id "$job" "$ENTRY" "${TRAINING_ARGUMENTS[@]}")
    end_if_dry_run "${command[@]}"
    exec "${command[@]}"
}

main "$@"
