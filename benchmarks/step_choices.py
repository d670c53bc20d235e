"""What each choice in the step is worth: DDP's options one after another, and ours with one choice turned back.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 benchmarks/step_choices.py

Same model, data in memory, fp32, AdamW, no clipping. All variants run in every round, in shuffled order, after one
round that warms up (and compiles); ratios are taken within each round.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import nn

from benchmarks.our_engine import Step, as_convolutions, make_engine, training_step
from benchmarks.peers.bare_ddp import BASELINE, TUNED_OPTIONS, ddp_step
from benchmarks.peers.job import Job, make_batches, make_network, take_turns, timed
from benchmarks.report import Section, ratios_to, save, show, spread, versions
from zerovision.models.whole_input import WholeInputConv2d
from zerovision.training.engines import flat_buffers
from zerovision.training.world.world import World, start_world, stop_world


def our_step(
    module: nn.Module,
    world: World,
    batch_size: int,
    *,
    fused: bool = True,
    compiled: bool = False,
    channels_last: bool = True,
) -> Step:
    """Our step under `ddp` as a training takes it, or with a choice turned back."""
    engine = make_engine(module, "ddp", "fp32", batch_size, world, compiles=compiled)
    for group in engine.optimizer.param_groups:
        group["fused"] = fused
    return training_step(engine, channels_last=channels_last)


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Let engines that are built inside the block exchange through gloo."""
    kept, flat_buffers.SHARED_MEMORY = flat_buffers.SHARED_MEMORY, Path("/nowhere")
    try:
        yield
    finally:
        flat_buffers.SHARED_MEMORY = kept


def make_builders(job: Job, world: World, *, compiles: bool) -> dict[str, Callable[[], Step]]:
    """Return what builds each variant, by its name."""

    def ddp(**options: bool) -> Callable[[], Step]:
        return lambda: ddp_step(make_network(job), job, **options)

    def ours(**choices: bool) -> Callable[[], Step]:
        return lambda: our_step(make_network(job), world, job.batch_size, **choices)

    views = {"gradient_as_bucket_view": True, "static_graph": True}
    builders = {
        BASELINE: ddp(),
        "+ gradients as bucket views, static graph": ddp(**views),
        "+ no broadcast of buffers": ddp(**TUNED_OPTIONS),
        "+ fused AdamW": ddp(fused=True, **TUNED_OPTIONS),
        "+ channels_last": ddp(fused=True, channels_last=True, **TUNED_OPTIONS),
        "ours": ours(),
        "ours, AdamW not fused": ours(fused=False),
        "ours, images not channels_last": ours(channels_last=False),
        "ours, over gloo instead of shared memory": without_shared_memory()(ours()),
    }
    if any(isinstance(part, WholeInputConv2d) for part in make_network(job).modules()):
        builders["ours, classifier of convolutions"] = lambda: our_step(
            as_convolutions(make_network(job)), world, job.batch_size
        )
    if compiles:
        builders["ours, --compile on"] = ours(compiled=True)
    return builders


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", default="mobilenet")
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per variant and round")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="with torch.compile")
    parser.add_argument("--only", nargs="*", help="of these variants, beside the baseline: all are in memory at a time")
    given = parser.parse_args()
    world = start_world()
    job = Job(model_type=given.model_type, batch_size=given.batch_size, image_size=given.image_size)
    builders = make_builders(job, world, compiles=given.compile)
    if unknown := set(given.only or ()) - builders.keys():
        parser.error(f"--only {sorted(unknown)}: there are {', '.join(builders)}")
    names = [name for name in builders if given.only is None or name in (BASELINE, *given.only)]
    measures = {name: timed(builders[name]()) for name in names}
    rounds = take_turns(measures, make_batches(job, given.steps), given.rounds)
    if world.is_main:
        ratios = ratios_to(BASELINE, rounds)
        rows = [
            (name, spread(ratios[name]), f"{1e3 * statistics.median(r[name] for r in rounds):.1f}") for name in names
        ]
        text = (
            f"{given.model_type}, {given.batch_size} x {given.image_size} px per rank, fp32, AdamW, no clipping, "
            f"{world.describe()}; {given.rounds} rounds of {given.steps} steps; median (quartiles) of the ratio."
        )
        section = Section("One step", text, ("variant", "time / bare DDP", "ms (median)"), rows)
        show(section)
        facts = f"{versions('torch', 'timm')}. The rows with + add to the row above them."
        script = shlex.join(["benchmarks/step_choices.py", *sys.argv[1:]])
        command = f"OMP_NUM_THREADS=1 torchrun --nproc_per_node={world.size} {script}"
        save(f"step_choices_{given.model_type}", "What each choice in the step is worth", facts, command, [section])
    stop_world()


if __name__ == "__main__":
    main()
