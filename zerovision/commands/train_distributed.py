"""Trains an image classifier: the entry point that every launcher starts once per rank.

bash scripts/launch_distributed.sh mobilenet ddp 8 16 50
deepspeed --num_gpus=8 scripts/train_distributed.py --model-type efficientnet --strategy fsdp_stage2
torchrun --nproc_per_node=8 scripts/train_distributed.py --model-type vgg --strategy fsdp_stage3
accelerate launch --multi_gpu --num_processes 8 scripts/train_distributed.py --model-type vgg
srun --ntasks=8 python scripts/train_distributed.py --model-type vgg
python scripts/train_distributed.py --epochs 1          # one process, no launcher
"""

from __future__ import annotations

import os
import signal
import sys

from zerovision.training.base.errors import USER_ERROR_EXIT_CODE, UserError
from zerovision.training.base.heartbeat import OUTPUT_SECONDS, HeartbeatWriter
from zerovision.training.base.lasting_output import finish_output, outlast_readers
from zerovision.training.base.run_folder import as_typed
from zerovision.training.config.command_line import parse_args, run_script
from zerovision.training.engines.settings import check_files
from zerovision.training.world.launchers import adopt_rank


def train(arguments: list[str]) -> int:
    """Train as the command line specifies, and return the exit code."""
    adopt_rank()
    config, only_check = parse_args(arguments)
    check_files(config)
    if only_check:
        print(as_typed("these settings are valid; scripts/doctor.py --check-data FOLDER checks the images"))
        return 0
    heartbeat = HeartbeatWriter.of_this_process(config.hang_timeout)
    # Imported late, because `--help` and the launchers' check need none of these modules.
    import psutil

    from zerovision.delivery.evaluation_files import leave_files
    from zerovision.planning.search import predicted_tensors
    from zerovision.training.observe.new_run import Origin
    from zerovision.training.run import run
    from zerovision.training.steps.carrier import Start

    start = Start(Origin.of(os.environ), heartbeat, predicted_tensors, began=psutil.Process().create_time())
    try:
        exit_code = run(config, start, leave_files)
    except UserError:
        heartbeat.ended(USER_ERROR_EXIT_CODE)
        raise
    if exit_code == 0:
        heartbeat.succeeded()
    heartbeat.ended(exit_code)
    return exit_code


def main() -> int:
    """Run the command line and exit the process with its exit code."""
    # Until the run installs its own signal handlers, Ctrl-C ends the process immediately and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    outlast_readers()
    exit_code = run_script("error", list, train)
    finish_output(OUTPUT_SECONDS)
    # Not sys.exit: everything is closed and synced by now, and shutting down the interpreter while threads of gloo,
    # NCCL and other libraries run occasionally aborts after a successful run (about 1 in 50 here).
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main())
