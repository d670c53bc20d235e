"""Trains models of the zoo under every strategy, one after another on the same ranks, into runs STRATEGY-MODEL.

    deepspeed --num_gpus 2 tests/training/matrix_entry.py --log-dir /tmp/logs basic_cnn,vgg

Most of a launch is its start: 18 trainings in one launch take minutes less than 18 launches. `--epochs` holds for
all models but vgg, of which one epoch must do: a step of its 134 million parameters takes seconds on a CPU. Its rate is
a tenth of the others': at theirs its first losses jump to 17, and the last bits of two strategies grow with them. And
its engine is DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.models import MODELS
from zerovision.training.config.command_line import parse_args
from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.run import set_up, train
from zerovision.training.world.world import start_world, stop_world


def main() -> int:
    config, _ = parse_args(sys.argv[1:-1])
    world = start_world()
    for strategy, name in itertools.product(STRATEGIES, sys.argv[-1].split(",")):
        weights = config.weights if MODELS[name].always_pretrained else ""
        changes = {"strategy": strategy, "model_type": name, "run_name": f"{strategy}-{name}", "weights": weights}
        if name == "vgg":
            changes |= {"epochs": 1, "learning_rate": config.learning_rate / 10, "engine": "deepspeed"}
        context = set_up(dataclasses.replace(config, **changes), world)
        exit_code = train(context)
        context.close()
        if exit_code:
            return exit_code
    context.start.stop.close()
    stop_world()
    return 0


if __name__ == "__main__":
    os._exit(main())  # as train_distributed.py does
