#!/usr/bin/env bash
# Train on the GPUs of this machine, or on CPU ranks if it has none: --help explains.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
Train an image classifier on the GPUs of this machine (on CPU ranks if it has none).

    bash launch_distributed.sh <model> <strategy> <num_gpus> <batch_size> <epochs> [flags]

  model       mobilenet, efficientnet, vgg, ... or timm:<any timm model>
  strategy    ddp, fsdp_stage2 or fsdp_stage3: how the training state is sharded; auto: as scripts/plan.py recommends,
              for this machine or --gpu NAME
  num_gpus    GPUs to use; without any GPU, as many CPU ranks
  batch_size  images per GPU; auto: the most that fit, for --global-batch N or about 256 images per update
  epochs      passes over the training data
  flags       any flag of train_distributed.py ('python scripts/train_distributed.py --help' lists all),
              --master_port N, and --max-restarts N: how often in a row a failed training is started again
              without having saved a newer checkpoint in between (default 3, 0 to 1000),
              and --preflight: let scripts/doctor.py look at machine and data first, and stop if something is wrong

Examples:
    bash launch_distributed.sh mobilenet ddp 4 16 50
    bash launch_distributed.sh efficientnet fsdp_stage2 8 8 100 --data ~/photos --learning-rate 0.0005
    DRY_RUN=1 bash launch_distributed.sh mobilenet ddp 2 16 1

Environment variables:
    DRY_RUN=1              print the command as one line instead of running it
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
    70                a machine computed wrong, too often (--audit)
    71                a rank ran out of memory (--on-oom)
    74                no checkpoint could be written for 10 minutes
    78                training is done, and has diverged: its last epoch's losses are far beyond guessing or not finite
    130, 138, 143     stopped by Ctrl-C, SIGUSR1, SIGTERM; --resume goes on
  and when the restarts are used up, that of the last failure:
    124               a rank hung
    128 + n           signal n ended a rank: 137 for kill -9 and for want of memory
    any other         the rank's own
HELP
}

hand_over launch.py launch_distributed.sh "$@"
