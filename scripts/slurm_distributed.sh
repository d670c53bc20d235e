#!/usr/bin/env bash
#SBATCH --job-name=slurm_distributed
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch resolves a relative --output against the folder where it runs; without logs/ there, the job would be lost.
# So the job itself opens logs/slurm_distributed_<job>.out, which is the same file from the root and from scripts/.
#SBATCH --output=/dev/null
set -euo pipefail

# In a job, $0 is Slurm's private copy of this script: the repository is the folder where sbatch ran, or its parent.
SCRIPTS_FOUND=
for folder in "$(dirname -- "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}" "${SLURM_SUBMIT_DIR:-.}/scripts"; do
    if [[ -f $folder/common.sh ]]; then
        SCRIPTS_FOUND=$folder
        break
    fi
done
if [[ -n ${SLURM_JOB_ID:-} && $(readlink "/proc/$$/fd/1") == /dev/null ]]; then
    # Without the repository, the user must still find the message below: it goes to the folder where sbatch ran.
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

hand_over slurm.py slurm_distributed.sh "$@"
