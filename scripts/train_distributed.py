"""Train an image classifier: the entry that every launcher starts, once per rank.

bash scripts/launch_distributed.sh mobilenet ddp 8 16 50
deepspeed --num_gpus=8 scripts/train_distributed.py --model-type efficientnet --strategy fsdp_stage2
torchrun --nproc_per_node=8 scripts/train_distributed.py --model-type vgg --strategy fsdp_stage3
python scripts/train_distributed.py --epochs 1          # one process, no launcher
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.command_line import parse_args, print_user_error
from training.config import TrainConfig
from training.errors import UserError
from training.observe.heartbeat import FOLDER_VARIABLE, HeartbeatWriter
from training.parallel.strategies import read_strategy_json

SLOW_IMPORT_S = 300.0  # a thousand ranks that read torch from one network disk at once


def main() -> int:
    """Parse the command line and train; return the exit code."""
    # Until the run listens for signals itself, Ctrl-C ends the process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    heartbeat = None
    try:
        config, only_check = parse_args(sys.argv[1:])
        read_strategy_json(config.strategy, config.deepspeed_config)
        if only_check:
            return 0
        heartbeat = start_heartbeat(config)
        # Imported late: `--help` and the launchers' check need none of it.
        from training.checkpoint.resume import RunStart
        from training.observe.run_lock import Origin
        from training.run import run

        exit_code = run(config, RunStart(Origin.of(os.environ), heartbeat), deliver)
        if exit_code == 0 and os.environ.get("RANK", "0") == "0":
            heartbeat.succeeded()
    except UserError as error:
        # Only mistakes found before the process group exists come here.
        exit_code = print_user_error("error", error)
    if heartbeat is not None:
        heartbeat.ended(exit_code)
    return exit_code


def deliver(*arguments: Any, **options: Any) -> list[str]:
    """Write evaluation, model card and report; what does that is imported once the training is over."""
    from delivery.end_of_run import leave_files

    return leave_files(*arguments, **options)


def start_heartbeat(config: TrainConfig) -> HeartbeatWriter:
    """Return the writer of this rank's heartbeats; it writes nothing without our launcher."""
    folder = os.environ.get(FOLDER_VARIABLE)
    rank = os.environ.get("RANK", "0")
    number = int(rank) if rank.isdigit() else 0
    heartbeat = HeartbeatWriter(Path(folder) if folder else None, number, config.hang_timeout)
    heartbeat.watch_stacks()
    if "LOCAL_RANK" in os.environ:
        heartbeat.end_with_parent()
    heartbeat.beat("import", allowed_s=SLOW_IMPORT_S + config.hang_timeout)
    return heartbeat


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: everything is closed and synced by now, and taking the interpreter down under the threads of gloo,
    # NCCL and DeepSpeed now and then ends in an abort after a run that went well (about 1 in 50 here).
    os._exit(exit_code)
