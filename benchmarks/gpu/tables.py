"""Part 2 of `run.py`: eager, compiled and with CUDA graphs, at a large batch and at the guide's.

python -m benchmarks.gpu.tables --seconds 200
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.gpu.contestants import COMPILED, OURS, TIMM
from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.measure import compare, release
from benchmarks.gpu.options import Options, part_options
from training.world.world import World, start_world, stop_world

# Model and images, in order of worth: large batches first, then the guide's for ddp.
CASES = (
    *(("timm:resnet50", 128), ("mobilenet", 128), ("timm:vit_small_patch16_224", 128), ("efficientnet", 128)),
    *(("mobilenet", 32), ("vgg", 64), ("efficientnet", 16), ("vgg", 8), ("cnn_lstm", 8), ("ensemble", 8)),
)


def measure(model: str, batch_size: int, options: Options, world: World, deadline: float) -> None:
    """Emit a row of each contestant."""
    for row in compare((OURS, TIMM, *COMPILED), model, batch_size, options.effort, world, deadline):
        emit("compiled", model=model, batch_size=batch_size, pixels=options.effort.image_size, **row)


def main() -> None:
    """Give each case its share of the time that is left."""
    options = part_options(__doc__)
    # A CPU compiles for minutes what a GPU has in tens of seconds.
    cases = [(model, 4) for model in options.models or ("basic_cnn",)] if options.is_quick else CASES
    world = start_world()
    for number, (model, batch_size) in enumerate(cases):
        # Compiling takes tens of seconds: the first cases may take three shares.
        share = 3 * (options.deadline - time.monotonic()) / (len(cases) - number + 2)
        end = time.monotonic() + share
        attempt(
            f"{model}, {batch_size} images", partial(measure, model, batch_size, options, world, end), options.deadline
        )
        release(world)
    stop_world()


if __name__ == "__main__":
    main()
