#!/usr/bin/env bash
#SBATCH --job-name=slurm_distributed
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
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
    LOG_FOLDER=${LOG_FOLDER:-${SLURM_SUBMIT_DIR:-.}}
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
  batch_size images per GPU; auto: the most that fit, for --global-batch N or about 256 images per update
  flags      any flag of train_distributed.py, --master_port N, and --max-restarts N: how often in a row a failed
             training is started again inside the job without a newer checkpoint in between (default 3, 0 to 1000);
             --allow-differences: train although versions or code differ between the nodes;
             and --preflight: let the doctor examine machines, data and network first, and stop if something is wrong
  (model, strategy, epochs: as launch_distributed.sh --help says)

Examples:
    sbatch slurm_distributed.sh mobilenet ddp 8 16 100
    sbatch --nodes=4 --gres=gpu:8 slurm_distributed.sh vgg fsdp_stage3 8 8 100
    sbatch --partition=cpu --gpus-per-node=0 slurm_distributed.sh mobilenet ddp 2 16 100
    sbatch --array=0-3 slurm_distributed.sh mobilenet ddp 8 16 100 --seed {task}
    sbatch --array=0-1 slurm_distributed.sh mobilenet,efficientnet ddp 8 16 100
    DRY_RUN=1 bash slurm_distributed.sh mobilenet ddp 8 16 100

The run is called slurm-<job> (slurm-<job>-<task> in an array) unless --run-name is given, and goes on from its newest
checkpoint (--resume auto) unless --resume is given. In an array, {task} in a flag stands for the task's number, and of
several models with commas each task trains its own: task 0 the first.

The job saves and is requeued 120 s before its time limit (sbatch --signal=B:USR1@300 for 300 s), and after a failure
once the restarts are used up. It stops if the same failure comes twice without a newer checkpoint in between.
The output goes to logs/slurm_distributed_<job>.out unless sbatch is given --output.
Environment variables:
    DRY_RUN=1      print the command as one line instead of running it
    MASTER_PORT    port on the first node the ranks meet on (default: from the job's number)
    MAX_RESTARTS   as --max-restarts, which wins
    STOP_TIMEOUT   seconds the ranks have to save and stop after a signal (default 300; Slurm may give them less)

Exit codes: as launch_distributed.sh --help says; 1 if --preflight found something wrong; 69 if too few nodes answer.
HELP
}

hand_over slurm.py slurm_distributed.sh "$@"
