"""The prediction of memory against closed forms and DeepSpeed's own; `benchmarks/memory.py` compares with processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from timm.layers import Attention, PatchEmbed
from torch import nn

from zerovision.models.activations import Activations, activations
from zerovision.models.dry_run import without_data
from zerovision.planning.memory import ModelSizes, RankShare, plan_memory
from zerovision.planning.run_workload import sizes_of, workload_of
from zerovision.training.config import TrainConfig
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.ways import ParallelPlan

PARAMETERS, BUCKET = 1_000_000, 10_000
SIZES = ModelSizes(
    PARAMETERS, PARAMETERS, largest_parameter=0, largest_block=100_000, next_block=80_000, outside=50_000
)
ACTIVATIONS = Activations(500, ((0, 0),))


def plan(stage, ranks, engine="deepspeed", sizes=SIZES, values=2, offload="none", **settings):
    parallel = ParallelPlan(stage, shards=ranks, offload=offload, bucket_elements=BUCKET)
    share = RankShare(sizes, settings.pop("activations", ACTIVATIONS))
    return plan_memory(share, parallel, engine, values, **settings)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_state_follows_the_zero_paper(ranks):
    """Section 3 of arXiv:1910.02054 in fp32: the optimizer's 12 bytes (copy, two moments) are shared at every stage."""
    whole, part = 4 * PARAMETERS, 4 * PARAMETERS / ranks
    for stage, weights, gradients in ((1, whole, whole), (2, whole, part), (3, part, part)):
        found = plan(stage, ranks)
        assert (found.weights, found.gradients, found.optimizer) == pytest.approx((weights, gradients, 3 * part))


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_deepspeeds_own_estimators(ranks):
    """They count 16-bit weights, and at stage 2 gradients in both sizes; here there are fp32 ones only."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    def state(stage):
        found = plan(stage, ranks)
        return found.weights + found.optimizer + found.gradients

    _, theirs = estimate_zero2_model_states_mem_needs(PARAMETERS, ranks, cpu_offload=False)
    assert state(2) == pytest.approx(theirs + 2 * PARAMETERS - 2 * PARAMETERS / ranks)
    _, theirs, largest_layer = estimate_zero3_model_states_mem_needs(
        PARAMETERS, 0, ranks, cpu_offload=False, cpu_offload_params=False
    )
    assert largest_layer == 0
    assert state(3) == pytest.approx(theirs + 2 * PARAMETERS / ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_pytorchs_own(ranks):
    """CPU ranks share one copy of the weights; FSDP2 keeps rows, and gathers all weights, or those of a block."""
    ddp, stage_2, stage_3 = (plan(stage, ranks, "torch") for stage in (1, 2, 3))
    part = 4 * PARAMETERS / ranks  # of the weights, and of the sum of the ranks' gradients
    assert (ddp.weights, ddp.optimizer, ddp.gradients) == (part, 2 * part, 4 * PARAMETERS + part)
    on_gpus = plan(1, ranks, "torch", device="cuda")  # where each rank has the others' gradients of its part, too
    assert (on_gpus.weights, on_gpus.gradients) == (4 * PARAMETERS, 2 * 4 * PARAMETERS + part)
    for sharded in (stage_2, stage_3):
        assert (sharded.weights, sharded.optimizer, sharded.gradients) == (part, 2 * part, part)
    assert stage_2.communication - stage_3.communication == 4 * (PARAMETERS - (80_000 + 50_000))
    for steps, sums in ((2, 1), (3, 1), (4, 2), (16, 4)):
        assert plan(2, ranks, "torch", accumulation_steps=steps).gradients == sums * stage_2.gradients


def test_one_rank_has_all_at_every_stage():
    for found in (plan(stage, 1, "torch") for stage in (1, 2, 3)):
        assert (found.weights, found.optimizer) == (4 * PARAMETERS, 8 * PARAMETERS)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_the_second_stage_has_a_lower_peak_on_gpus(engine):
    assert plan(1, 4, engine, device="cuda").peak > plan(2, 4, engine, device="cuda").peak


@pytest.mark.parametrize(("steps", "buffers"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 4)])
def test_accumulation_parks_sums(steps, buffers):
    """log2(A) - 1 buffers beside the first of a power of two from 4 on, as docs/concepts/memory.md says."""
    found = plan(1, 2, "torch", accumulation_steps=steps)
    assert found.gradients == 4 * PARAMETERS * (buffers + 1 / 2)  # and its part of the ranks' sum


MOMENTS = Activations(500, ((30_000_000, 0), (29_000_000, PARAMETERS // 2)))


def test_gradients_are_taken_as_backward_computes_them():
    """Half of them are there at DeepSpeed's worst moment; under ddp PyTorch's has all of them from the beginning."""
    at_first, at_half = MOMENTS.moments
    found = plan(1, 1, activations=MOMENTS)
    assert found.tensors == 4 * PARAMETERS * (1 + 3) + 500 + at_half[0] + 4 * at_half[1]
    accumulated = plan(1, 1, activations=MOMENTS, accumulation_steps=2)
    assert accumulated.tensors == 4 * PARAMETERS * (1 + 3 + 1) + 500 + at_first[0]
    assert plan(1, 1, "torch", activations=MOMENTS).tensors == 4 * PARAMETERS * (1 + 2 + 1) + 500 + at_first[0]


@pytest.mark.parametrize("shards", [2, 4])
def test_fsdp_sends_what_is_in_no_block_when_backward_ends(shards):
    """Until then the gradients of the blocks that are done are sharded: here of all but the 50,000."""
    found = plan(3, shards, "torch", activations=MOMENTS)
    gathered, whole_gradients = 4 * (80_000 + 50_000), 4 * (2 * 100_000 + 50_000)
    sharded = 4 * (PARAMETERS // 2 - 50_000) / shards
    at_half = gathered + whole_gradients + sharded + MOMENTS.moments[1][0]
    at_first = gathered + MOMENTS.moments[0][0]
    assert found.tensors == 4 * PARAMETERS * 3 / shards + 500 + max(at_half, at_first)


def test_what_deepspeeds_step_needs():
    """A copy of a bucket that is sent, or of a larger gradient; a gradient's part in fp64, for its norm."""
    large = ModelSizes(PARAMETERS, PARAMETERS, largest_parameter=400_000)
    assert plan(1, 4, sizes=large).step == 8 * PARAMETERS / 4  # longer than the part, 400,000 values would be too
    assert plan(1, 16, sizes=large).step == 4 * 400_000
    assert plan(1, 1).step == 4 * PARAMETERS


def test_buckets_are_what_is_written_of_them_on_a_cpu():
    """Of DeepSpeed's two at stage 2, `torch.empty` on a GPU takes all of both at once."""
    larger = ParallelPlan(2, shards=2, bucket_elements=50 * PARAMETERS)
    words = (RankShare(SIZES, ACTIVATIONS), larger, "deepspeed", 2)
    assert plan_memory(*words).communication == 4 * PARAMETERS
    assert plan_memory(*words, device="cuda").communication == 2 * 4 * 50 * PARAMETERS


def test_offload_moves_bytes_to_the_cpu():
    on_gpu = {offload: plan(3, 2, offload=offload, device="cuda") for offload in ("none", "optimizer", "all")}
    none, optimizer, everything = on_gpu.values()
    assert optimizer.offloaded == none.optimizer + none.gradients
    assert everything.offloaded == optimizer.offloaded + none.weights
    assert none.tensors - everything.tensors == everything.offloaded
    assert plan(3, 2, offload="all").offloaded == 0  # a CPU rank has one memory


def test_a_gpu_needs_more_than_its_tensors():
    found = plan(1, 2, device="cuda")
    assert found.peak > found.tensors
    assert plan(1, 2).peak == plan(1, 2).tensors


def test_frozen_weights_have_no_gradients_and_moments():
    frozen = ModelSizes(PARAMETERS, PARAMETERS // 10, largest_parameter=0)
    found = plan(1, 1, "torch", sizes=frozen)
    assert (found.weights, found.gradients) == (4 * PARAMETERS, 4 * PARAMETERS // 10)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ({}, 2),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "lamb"}, 2),
        ({"optimizer": "adan"}, 4),
        ({"ema": 0.999, "lookahead": 6}, 4),
        ({"local_steps": 10}, 4),
        ({"local_steps": 10, "outer_precision": "bf16"}, 5),
    ],
)
def test_what_the_optimizer_keeps(words, values):
    assert workload_of(TrainConfig(model_type="basic_cnn", **words), 10, 32).optimizer_values == values


def test_activations_of_a_small_network():
    """Kept are the images (the first layer's input) and the second layer's input, which ReLU keeps as its output."""
    network = without_data(nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5), nn.ReLU(), nn.Linear(5, 2)))
    images, hidden = 7 * 3 * 4 * 4, 7 * 5
    logits = loss = 1  # alive too when forward ends: the logits; their sum when backward begins
    found = activations(network, (7, 3, 4, 4))
    assert found.saved == 4 * (images + hidden + 7 * 2 * logits)
    # the gradient of the logits' sum, of the logits, and in the end of both the hidden layer and its weights
    assert 4 * loss <= found.workspace <= 4 * (loss + 7 * 2 + hidden + 3 * 4 * 4 * 5)


def test_activations_of_a_convolution_with_batchnorm():
    """Kept are the images, the convolution's output, BatchNorm's mean and deviation per channel, and ReLU's output."""
    network = without_data(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
    images, maps = 2 * 3 * 6 * 6, 2 * 8 * 6 * 6
    assert activations(network, (2, 3, 6, 6)).saved == 4 * (images + 2 * maps + 2 * 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_keeps_no_matrix_of_all_tokens_by_all(precision):
    """What is kept of four times as many tokens is four times as much (Dao et al. 2022), but for weights in 16 bits."""
    network = nn.Sequential(PatchEmbed(None, 2, 3, 16), Attention(16, 2))
    few, many = (activations(without_data(network), (2, 3, size, size), precision).saved for size in (16, 32))
    weights = 0 if precision == "fp32" else 2 * sum(part.numel() for part in network.parameters() if part.ndim > 1)
    assert 0 <= 4 * few - many <= 3 * weights


@pytest.mark.parametrize(("kernel", "groups", "copies"), [(1, 1, 0), (3, 1, 2), (7, 1, 2), (3, 512, 2), (5, 512, 256)])
def test_copies_of_the_weights_on_a_cpu(kernel, groups, copies):
    """Measured on oneDNN with one layer: its gradient twice more, and 16 x 16 times of a large depthwise kernel."""
    network = nn.Sequential(nn.Conv2d(512, 512, kernel, padding=kernel // 2, groups=groups, bias=False), nn.Flatten())
    weight_bytes = 4 * 512 * 512 // groups * kernel**2
    shape = (1, 512, 1, 1)
    gpu = activations(without_data(network), shape, device="cuda")
    cpu = activations(without_data(network), shape)
    other = activations(without_data(network), shape, channels_last=False)
    assert cpu.workspace - gpu.workspace == copies * weight_bytes
    assert other.workspace - cpu.workspace == (weight_bytes if copies == 2 else 0)


def test_moments_of_backward():
    """The second layer's gradient is complete when the first one's is computed."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 500, bias=False), nn.Linear(500, 2, bias=False))
    found = activations(without_data(network), (1, 3, 4, 4))
    assert [done for _, done in found.moments] == [500 * 2]  # and at no earlier moment more is taken
    assert found.workspace >= 4 * 48 * 500


def test_autocast_halves_activations_and_copies_weights():
    """In 16 bits: images, hidden layer and logits, and the second weight's copy; the images in fp32 as well.

    The first weight's copy is not needed: the images have no gradient.
    """
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False))
    images, hidden, copy = 7 * 48, 7 * 5, 5 * 2
    found = activations(without_data(network), (7, 3, 4, 4), "bf16")
    assert found.saved == 2 * (images + hidden + copy + 7 * 2) + 4 * images


def test_norms_in_fp32_on_gpus_alone():
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 2))
    cpu, cuda = (activations(without_data(network), (8, 3, 4, 4), "bf16", device).saved for device in ("cpu", "cuda"))
    assert cuda > cpu


class Blocks(nn.Module):
    """Four equal blocks, as timm's networks have them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 1), nn.ReLU()))) for _ in range(4))
        )

    def forward(self, images):
        return self.blocks(images).flatten(1)


def test_checkpointing_keeps_the_blocks_inputs():
    """And recomputes a block at a time: its three maps are alive again in backward."""
    network, maps = Blocks(), 2 * 3 * 8 * 8
    whole = activations(without_data(network), (2, 3, 8, 8))
    enable_activation_checkpointing(network)
    found = activations(without_data(network), (2, 3, 8, 8))
    assert whole.saved == 4 * maps * (1 + 3 * 4)  # a convolution's output is ReLU's too
    assert found.saved == 4 * maps * (1 + 4)
    assert 4 * maps * 3 <= found.workspace < 4 * maps * 6


def test_sizes_of_a_model():
    network = Blocks()
    found = sizes_of(network)
    block = 3 * (3 * 3 + 3)
    assert found == ModelSizes(4 * block, 4 * block, largest_parameter=9, largest_block=block, next_block=block)
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(3, width)) for width in (9, 2, 7, 1)))
    sizes = sizes_of(nn.Sequential(stages))
    assert (sizes.largest_block, sizes.next_block) == (4 * 9, 4 * 2)
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    norm[0].requires_grad_(False)
    assert sizes_of(norm).trained == 8
    assert sizes_of(norm).buffer_bytes == 2 * 4 * torch.float32.itemsize + torch.int64.itemsize


@pytest.mark.parametrize(("engine", "device"), [*itertools.product(("torch", "deepspeed"), ("cpu", "cuda"))])
def test_every_part_grows_with_the_model(engine, device):
    larger = ModelSizes(
        2 * PARAMETERS, 2 * PARAMETERS, 0, 2 * SIZES.largest_block, 2 * SIZES.next_block, 2 * SIZES.outside
    )
    for stage in (1, 2, 3):
        assert plan(stage, 2, engine, larger, device=device).peak > plan(stage, 2, engine, device=device).peak
