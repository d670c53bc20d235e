"""Steps that are undone: BatchNorm as before them, counts, names, and when they end a run."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from small_checkpoints import ALONE
from timm.layers import BatchNormAct2d
from torch import nn

from tests.kit import Recorder, assert_equal
from zerovision.training.base.errors import TOO_MANY_BAD_STEPS_EXIT_CODE, RunEnded
from zerovision.training.base.leaves import Leaves
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepResult
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.engines.precision import DynamicLossScale
from zerovision.training.observe.observer import Seen, StepDone
from zerovision.training.steps.nonfinite_steps import NAMES_IN_MESSAGE, NonFiniteGuard
from zerovision.training.tasks.scores import sample_losses

APPLIED, SKIPPED = StepResult(True, 1.0), StepResult(False, float("inf"))


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).train()


def batch_of(indices, seed=0):
    images = torch.randn(len(indices), 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Batch(images, torch.arange(len(indices)) % 5, torch.ones(len(indices)), torch.tensor(indices))


class Run:
    """A step guard over a real model, of which only the engine's decision to skip is played."""

    def __init__(self, most_consecutive=0, loss_scale=None, skipped=0, consecutive=0):
        self.model, self.log = small_model(), Recorder()
        engine = SimpleNamespace(module=self.model, loss_scale=loss_scale, buffers=ModelBuffers(self.model), group="")
        progress = Progress(skipped_steps=skipped, bad_steps_in_row=consecutive)
        self.state = SimpleNamespace(engine=engine, progress=progress)
        self.guard = NonFiniteGuard(self.state, ALONE, Loggers([self.log]), most_consecutive, "photo-{}.png".format)
        self.step_number = 0

    def step(self, result, *batches, spoil=lambda losses: losses):
        self.step_number += 1
        self.guard.before_step(self.step_number - 1)
        for batch in batches or [batch_of([1, 2, 3])]:
            losses = sample_losses(self.model(batch.images), batch.labels)
            self.guard.seen(Seen(batch, losses, losses, spoil(losses)))
        done = StepDone(self.step_number - 1, result)
        self.guard.after_step(done)
        return done.applied

    @property
    def counts(self):
        return self.state.progress.skipped_steps, self.state.progress.bad_steps_in_row

    def buffers(self):
        return copy.deepcopy(dict(self.model.named_buffers()))


@pytest.mark.parametrize("deferred", [False, True])
def test_no_images_are_kept_until_the_step_is_over(deferred):
    """They would fill a GPU's memory over the micro-steps of an accumulation."""
    run, batch = Run(), batch_of([1, 2, 3])
    batch.images[1] = torch.nan
    images = weakref.ref(batch.images)
    losses = sample_losses(run.model(batch.images), batch.labels).detach()
    run.guard.before_step(0)
    run.guard.seen(Seen(batch, losses, losses, losses))
    del batch
    assert images() is None
    run.guard.after_step(StepDone(0, on_the_device(False) if deferred else SKIPPED))
    run.guard.settle()
    assert run.log.messages[0].endswith("an image is not finite on rank 0, samples photo-2.png")


def test_a_skipped_step_leaves_no_trace_in_batchnorm():
    run, undisturbed = Run(), small_model()
    broken = batch_of([7, 8, 9])
    broken.images[1] = torch.nan
    for seed in range(4):
        good = batch_of([1, 2, 3], seed)
        assert run.step(APPLIED, good)
        undisturbed(good.images)
        before = run.buffers()
        assert not run.step(SKIPPED, good, broken)
        assert_equal(run.buffers(), before)
    assert_equal(run.buffers(), dict(undisturbed.named_buffers()))
    assert run.counts[0] == 4


def test_a_micro_step_without_an_update_counts_as_good():
    run = Run(consecutive=3, skipped=3)
    assert run.step(None)
    assert run.counts == (3, 0)


def test_counts_go_on_after_a_resume_and_begin_anew_after_a_good_step():
    run = Run(most_consecutive=4, skipped=7, consecutive=2)
    run.step(SKIPPED)
    assert run.counts == (8, 3)
    run.step(APPLIED)
    for count in (1, 2, 3):
        run.step(SKIPPED)
        assert run.counts == (8 + count, count)
    before = run.buffers()
    with pytest.raises(RunEnded, match="4 steps in a row") as caught:
        run.step(SKIPPED)
    assert caught.value.exit_code == TOO_MANY_BAD_STEPS_EXIT_CODE
    assert str(caught.value).isprintable()
    assert_equal(run.buffers(), before)


def test_no_limit_is_no_limit():
    run = Run(most_consecutive=0)
    for _ in range(30):
        assert not run.step(SKIPPED)
    assert run.counts[1] == 30


def with_broken_image(value):
    batch = batch_of([4, 5, 6])
    batch.images[2, 1, 3, 3] = value
    return batch


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_broken_image_is_named_not_those_that_it_spoils(value):
    run = Run()
    run.step(SKIPPED, batch_of([1, 2, 3]), with_broken_image(value))
    told = "step 1 skipped on all ranks (1 in a row): an image is not finite on rank 0, samples photo-6.png"
    values = {"step": 1, "in_row": 1, "culprit": "an image", "samples": ["photo-6.png"]}
    assert (run.log.messages, run.log.events) == ([told], [("skipped_step", values)])


def test_the_samples_of_a_broken_loss_are_named():
    run = Run()
    run.step(SKIPPED, spoil=lambda losses: losses * torch.tensor([1.0, torch.inf, 1.0]))
    assert "the loss is not finite" in run.log.messages[0]
    assert run.log.events[0][1]["samples"] == ["photo-2.png"]


def test_all_samples_are_named_where_only_the_gradient_is_broken():
    run = Run()
    indices = list(range(NAMES_IN_MESSAGE + 3))
    run.step(SKIPPED, batch_of(indices[:4]), batch_of(indices[4:]))
    assert "the gradient is not finite" in run.log.messages[0]
    assert run.log.messages[0].endswith(f"photo-{NAMES_IN_MESSAGE - 1}.png and 3 more")
    assert run.log.events[0][1]["samples"] == [f"photo-{index}.png" for index in indices]


def test_micro_batches_of_an_earlier_step_are_forgotten():
    run = Run()
    run.step(APPLIED, batch_of([1, 2]))
    run.step(SKIPPED, batch_of([3, 4]))
    assert run.log.events[0][1]["samples"] == ["photo-3.png", "photo-4.png"]


def test_a_search_of_fp16s_loss_scale_is_no_bad_step():
    run = Run(most_consecutive=1, loss_scale=DynamicLossScale(2.0**10))
    before = run.buffers()
    for _ in range(5):
        assert not run.step(SKIPPED)
    assert (*run.counts, run.log.events) == (5, 0, [])
    assert_equal(run.buffers(), before)


@pytest.mark.parametrize("spoiled", [False, True])
def test_with_fp16_a_broken_loss_or_the_smallest_scale_is_one(spoiled):
    scale = DynamicLossScale(2.0**10 if spoiled else DynamicLossScale.MINIMUM)
    run = Run(most_consecutive=2, loss_scale=scale)
    batch = with_broken_image(torch.nan) if spoiled else batch_of([1, 2])
    run.step(SKIPPED, batch)
    with pytest.raises(RunEnded):
        run.step(SKIPPED, batch)


# The buffers behind it.


def buffers_of_all_kinds():
    module = nn.Module()
    for name, tensor in {
        "f16": torch.randn(3, 5).half(),
        "f32": torch.randn(2, 3, 4),
        "turned": torch.randn(4, 6).t(),
        "f64": torch.randn(33, dtype=torch.float64),
        "count": torch.tensor(7),
        "whole": torch.arange(40, dtype=torch.int32),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0),
    }.items():
        module.register_buffer(name, tensor)
    module.register_buffer("hidden", torch.ones(2), persistent=False)
    module.register_buffer("absent", None)
    return module


def test_buffers_keep_names_types_and_values():
    torch.manual_seed(1)
    module = buffers_of_all_kinds()
    expected = copy.deepcopy(dict(module.named_buffers()))
    keys = list(module.state_dict())
    ModelBuffers(module)
    assert_equal(dict(module.named_buffers()), expected)
    assert list(module.state_dict()) == keys
    assert list(dict(module.named_buffers())) == list(expected)


def test_restoring_is_exact_for_every_type():
    module = buffers_of_all_kinds()
    module.f16[0, 0], module.f32[0, 0, 0], module.f64[5] = torch.inf, torch.nan, 1e-310
    expected = {name: buffer.clone() for name, buffer in module.named_buffers()}
    buffers = ModelBuffers(module)
    kept = buffers.copy()
    for buffer in module.buffers():
        buffer.zero_()
    buffers.restore(kept)
    for name, buffer in module.named_buffers():
        found, as_before = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (buffer, expected[name]))
        assert torch.equal(found, as_before)


def images_of(seed):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, affine=False), BatchNormAct2d(3)],
)
def test_a_batchnorm_works_on_as_before_and_is_set_back(norm):
    module, plain = copy.deepcopy(norm).train(), copy.deepcopy(norm).train()
    buffers = ModelBuffers(module)
    for seed in range(3):
        assert torch.equal(module(images_of(seed)), plain(images_of(seed)))
        assert_equal(dict(module.named_buffers()), dict(plain.named_buffers()))
        kept = buffers.copy()
        module(images_of(seed + 100))
        assert not torch.equal(kept[0], buffers.copy()[0]), "the update must reach the flat copy"
        buffers.restore(kept)
        assert_equal(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert torch.equal(module.eval()(images_of(9)), plain.eval()(images_of(9)))


def test_loading_weights_reaches_the_copy():
    module, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    other.running_mean += 5
    buffers = ModelBuffers(module)
    module.load_state_dict(other.state_dict())
    kept = buffers.copy()
    module(images_of(0))
    buffers.restore(kept)
    assert torch.equal(module.running_mean, other.running_mean)


def test_every_leaf_has_its_own_version_and_all_are_set_back():
    """Against one module per leaf; three leaves in turn, two steps, then a step that is undone."""
    module = nn.BatchNorm2d(3).train()
    leaves = [copy.deepcopy(module) for _ in range(3)]
    buffers = ModelBuffers(module, Leaves(1, 3))
    for undone in (False, False, True):
        kept = buffers.copy()
        for number, leaf in enumerate(leaves):
            buffers.select(number)
            seed = 10 * int(leaf.num_batches_tracked) + number
            output = module(images_of(seed))
            assert undone or torch.equal(output, leaf(images_of(seed)))
        if undone:
            buffers.restore(kept, unless=torch.tensor(True))
            assert not torch.equal(buffers.by_name()["running_mean"], kept[0][:, :3])
            buffers.restore(kept, unless=torch.tensor(False))
        for name, found in buffers.by_name().items():
            assert torch.equal(found, torch.stack([dict(leaf.named_buffers())[name] for leaf in leaves]))
    buffers.average(ALONE)
    mean = sum(leaf.running_var for leaf in leaves) / 3
    for found in (*buffers.by_name()["running_var"], module.running_var):
        assert torch.equal(found, mean)


def test_a_model_without_buffers():
    buffers = ModelBuffers(nn.Linear(2, 2))
    buffers.restore(buffers.copy())
    assert buffers.copy() == []


def on_the_device(applied):
    """A verdict that nobody has waited for."""
    return StepResult(torch.tensor(applied), torch.tensor(1.0))


def test_a_verdict_on_the_device_undoes_the_step_at_once_and_is_told_when_it_is_read():
    run, other = Run(), Run()
    for _ in range(2):
        run.step(on_the_device(True))
        other.step(APPLIED)
    run.step(on_the_device(False), spoil=lambda losses: losses * torch.tensor([1.0, float("nan"), 1.0]))
    assert_equal(run.buffers(), other.buffers())
    assert run.counts[0] == 0
    assert run.log.messages == []
    run.guard.settle()
    assert run.counts == (1, 1)
    told = ["step 3 skipped on all ranks (1 in a row): the loss is not finite on rank 0, samples photo-2.png"]
    assert run.log.messages == told
    run.step(on_the_device(True))
    run.guard.settle()
    assert run.counts == (1, 0)
    run.guard.settle()
    assert run.log.messages == told


def test_too_many_bad_steps_end_the_run_when_the_verdicts_are_read():
    run = Run(most_consecutive=3)
    for applied in (False, False, True, False, False, False):
        run.step(on_the_device(applied))
    with pytest.raises(RunEnded, match="3 steps in a row"):
        run.guard.settle()
