#!/usr/bin/env bash
# Train on the GPUs of several machines, listed in a hostfile, over ssh: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
Train an image classifier on the GPUs of several machines (on CPU ranks if they have none).

    bash launch_multi_node.sh <model> <strategy> <num_nodes> <gpus_per_node> <batch_size> <epochs> [flags]

  num_nodes, gpus_per_node   machines to use, from the top of the hostfile, and GPUs on each
  batch_size                 images per GPU; auto: the most that fit, for --global-batch N or about 256 images
  flags                      any flag of train_distributed.py, --master_port N, --max-restarts N (default 3),
                             --hostfile FILE: lines of 'name slots=N' (default: hostfile.txt here, else beside the
                             scripts folder; hostfile_example.txt shows one) or --hosts NAME,NAME,...,
                             --min-nodes N: after a failure go on with at least N machines (default: all);
                             the global batch stays, through accumulation;
                             --allow-differences: train although versions or code differ between the machines; and
                             --preflight: let the doctor examine machines, data and network first, and stop with 1
                             if something is wrong
  (model, strategy, epochs: as launch_distributed.sh --help says)

Examples:
    bash launch_multi_node.sh ensemble fsdp_stage3 4 8 8 100
    bash launch_multi_node.sh efficientnet ddp 4 8 16 90 --data /shared/flowers --min-nodes 2
    DRY_RUN=1 bash launch_multi_node.sh vgg fsdp_stage3 2 8 8 100 --hostfile lab.txt

Environment variables:
    HOSTFILE        as --hostfile
    FORWARD_ENV     names of more variables to pass to the ranks, with commas; NCCL_*, GLOO_*, TORCH*, OMP_*, CUDA_*,
                    PYTHON*, HF_* and some others are passed anyway
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

hand_over launch.py launch_multi_node.sh "$@"
