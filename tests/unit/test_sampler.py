"""The order of samples: a function of (seed, epoch) alone, each sample once unless asked otherwise, whole steps."""

from __future__ import annotations

import itertools
from collections import Counter
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sklearn.utils.class_weight import compute_sample_weight
from timm.data.distributed_sampler import RepeatAugSampler

from zerovision.training.config import TrainConfig
from zerovision.training.data.randomness import COPY
from zerovision.training.data.reading.sources import ArraySource
from zerovision.training.data.sampler import BatchPlan, EvaluationPlan, build_plan

SHAPES = [
    (samples, batch, accumulation, world)
    for samples, batch, accumulation, world in itertools.product((1, 7, 64, 101), (1, 4, 16), (1, 3), (1, 2, 8))
]


def epoch_of(plan: BatchPlan, epoch: int = 0):
    """All micro-batches of an epoch as {(step, micro_step, rank): (indices, weights)}."""
    return {
        (step, micro_step, rank): plan.micro_batch(epoch, step, micro_step, rank)[1:3]
        for step in range(plan.steps_per_epoch)
        for micro_step in range(plan.accumulation_steps)
        for rank in range(plan.world_size)
    }


@pytest.mark.parametrize(("samples", "batch", "accumulation", "world"), SHAPES)
def test_every_sample_counts_exactly_once(samples, batch, accumulation, world):
    plan = BatchPlan(samples, batch, accumulation, world, seed=3)
    batches = epoch_of(plan, epoch=2).values()
    assert all(indices.shape == weights.shape == (batch,) for indices, weights in batches)
    assert all(indices.dtype == np.int64 and weights.dtype == np.float32 for indices, weights in batches)
    totals = np.zeros(samples)
    for indices, weights in batches:
        np.add.at(totals, indices, weights)
    np.testing.assert_array_equal(totals, np.ones(samples))
    assert plan.images(plan.steps_per_epoch, 3 * plan.steps_per_epoch) == 2 * samples, "of two epochs"
    assert len(batches) * batch - samples < plan.global_batch


@pytest.mark.parametrize(("samples", "batch", "accumulation", "world"), SHAPES)
def test_loss_scale_makes_the_average_over_ranks_the_mean_over_samples(samples, batch, accumulation, world):
    plan = BatchPlan(samples, batch, accumulation, world, seed=0)
    losses = np.random.Generator(np.random.PCG64(5)).normal(size=samples)
    for step in range(plan.steps_per_epoch):
        parts = [
            plan.loss_scale_for(step) * (weights * losses[indices]).sum()
            for key, (indices, weights) in epoch_of(plan).items()
            if key[0] == step
        ]
        chosen = plan.draw_keys(0)[step * plan.global_batch :][: plan.global_batch]
        assert plan.real_samples(step) == plan.images(step, step + 1) == len(chosen)
        assert np.mean(parts) == pytest.approx(losses[chosen].mean())


@pytest.mark.parametrize(("accumulation", "world"), [(6, 2), (1, 12)])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("islands", [1, 2])
def test_an_island_takes_the_mean_over_its_own_samples(accumulation, world, repeats, islands):
    """The last step has 13 of 48 samples: of islands that get neighbouring ones, the second gets none."""
    plan, losses = BatchPlan(109, 4, accumulation, world, 0, repeats=repeats, groups=islands), np.arange(109.0)
    ranks = np.arange(world).reshape(islands, -1)
    for step, island in itertools.product(range(plan.steps_per_epoch), ranks.tolist()):
        leaves = [plan.micro_batch(0, step, leaf, rank) for rank in island for leaf in range(accumulation)]
        weights, own = (np.concatenate(parts) for parts in ([k.weights for k in leaves], [k.indices for k in leaves]))
        parts = [plan.loss_scale_for(step, island[-1]) * (key.weights * losses[key.indices]).sum() for key in leaves]
        real = own[weights > 0]
        assert plan.real_samples(step, island[0]) == len(real)
        assert np.mean(parts) == pytest.approx(losses[real].mean() if len(real) else 0.0)
    assert (len(real) == 0) == (islands == 2 and repeats == 1)


# 101 samples of classes 0, 2 and 3; the padding of an epoch repeats samples, so counts are taken without it
SKEWED = np.repeat([0, 2, 3], [90, 8, 3])[np.random.Generator(np.random.PCG64(1)).permutation(101)]


# 101 samples in 9 shards of 3 to 22, which lie there in another order than in the data set
SHARDS = np.repeat(np.arange(9), [3, 22, 8, 11, 12, 9, 17, 4, 15])
PLACES = np.stack([SHARDS, np.arange(101) * 1000], axis=1)[np.random.Generator(np.random.PCG64(2)).permutation(101)]
IN_SHARDS = {"places": PLACES, "window": 20}


@pytest.mark.parametrize("sampling", [{}, {"labels": SKEWED}, {"repeats": 3}, IN_SHARDS])
def test_order_is_the_same_for_any_number_of_ranks(sampling):
    """So the leaves of 8 images are the same on one rank, two, three or six."""
    orders = []
    for world, steps in ((1, 1), (1, 6), (2, 3), (3, 2), (6, 1), (8, 2)):
        plan = BatchPlan(101, 48 // (world * steps), steps, world, 7, **sampling)
        # Step by step, a rank's micro-batches one after another.
        places = itertools.product(range(plan.steps_per_epoch), range(world), range(steps))
        keys = [plan.micro_batch(4, step, micro_step, rank) for step, rank, micro_step in places]
        assert [key.leaf for key in keys] == [*range(len(keys))]
        order = np.concatenate([[key.indices, key.weights, key.draw_keys] for key in keys], axis=1)
        # Repeated samples are dealt to the leaves of a step.
        orders.append(np.sort(order.reshape(3, -1, 48)) if sampling.get("repeats") else order)
    for order in orders[1:]:
        np.testing.assert_array_equal(order, orders[0])


def test_permutation_depends_on_seed_and_epoch_only():
    plan = BatchPlan(500, 8, 1, 1, seed=1)
    np.testing.assert_array_equal(np.sort(plan.draw_keys(0)), np.arange(500))
    np.testing.assert_array_equal(plan.draw_keys(3), BatchPlan(500, 2, 5, 4, seed=1).draw_keys(3))
    orders = [plan.draw_keys(0), plan.draw_keys(1), BatchPlan(500, 8, 1, 1, seed=2).draw_keys(0)]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).mean() < 0.05


def test_balanced_sampling_draws_each_sample_as_often_as_scikit_learn_weighs_it():
    plan, epochs = BatchPlan(101, 8, 1, 1, seed=1, labels=SKEWED), 600
    counts = np.zeros(101)
    for epoch in range(epochs):
        keys = plan.draw_keys(epoch)
        assert len(np.unique(keys)) == len(keys) == 101, "copies of a sample have draws of their own"
        own = np.bincount(keys % COPY, minlength=101)
        shares = [own[label == SKEWED] for label in (0, 2, 3)]
        assert sorted(map(sum, shares)) == [33, 34, 34]
        assert all(share.max() - share.min() <= 1 for share in shares)
        counts += own
    for label in (0, 2, 3):
        assert counts[label == SKEWED].sum() == epochs * 101 / 3, "no class is favoured in the long run"
    np.testing.assert_allclose(counts / epochs, compute_sample_weight("balanced", SKEWED), rtol=0.2)
    assert (plan.draw_keys(0) != plan.draw_keys(1)).mean() > 0.9


@pytest.mark.parametrize("ranks", [1, 4])
def test_repeated_augmentation_takes_the_samples_that_timm_takes(monkeypatch, ranks):
    """timm deals the order to its ranks in turn: its global batches hold what ours do."""
    order = BatchPlan(101, 1, 1, 1, 5).draw_keys(2)[:34]
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.tensor(order))
    samplers = [RepeatAugSampler(range(101), ranks, rank, num_repeats=3, selected_round=0) for rank in range(ranks)]
    theirs = np.stack([list(sampler) for sampler in samplers], axis=1).reshape(-1)[:101]
    keys = BatchPlan(101, 8, 2, 1, 5, repeats=3).draw_keys(2)
    np.testing.assert_array_equal(keys % COPY, theirs)
    np.testing.assert_array_equal(keys // COPY, np.arange(101) % 3)
    plan = BatchPlan(101, 5, 1, ranks, 5, repeats=3)
    for rank, sampler in enumerate(samplers):
        own = np.concatenate([batch.indices[batch.weights > 0] for batch in plan.epoch_keys(2, rank)])
        np.testing.assert_array_equal(own, list(sampler)[: len(own)])


def test_balanced_samples_are_repeated_too():
    keys = BatchPlan(101, 8, 1, 1, 5, SKEWED, repeats=3).draw_keys(2)
    assert len(np.unique(keys)) == len(keys)
    assert sorted(np.unique(SKEWED[keys[::3] % COPY], return_counts=True)[1]) == [11, 11, 12]
    np.testing.assert_array_equal(keys[:99:3] % COPY, keys[2:99:3] % COPY)


def test_a_plan_keeps_its_labels_when_data_workers_get_them():
    source = ArraySource(torch.zeros(len(SKEWED), 1, 1, 1, dtype=torch.uint8), torch.tensor(SKEWED))
    plan = build_plan(TrainConfig(sampling="balanced"), source, world_size=1)
    expected = BatchPlan(101, 16, 1, 1, TrainConfig.seed, SKEWED).draw_keys(0)
    ForkingPickler.dumps(source)
    source.labels.zero_()  # as whoever gets the memory next may
    assert not np.shares_memory(plan.labels, source.labels.numpy())
    np.testing.assert_array_equal(plan.draw_keys(0), expected)


def test_permutation_is_uniform():
    """Each of 6 samples stands at each of 6 places about equally often: chi-squared with 25 degrees of freedom."""
    epochs = 6000
    counts = np.zeros((6, 6))
    for epoch in range(epochs):
        counts[np.arange(6), BatchPlan(6, 1, 1, 1, 0).draw_keys(epoch)] += 1
    chi_squared = ((counts - epochs / 6) ** 2 / (epochs / 6)).sum()
    assert chi_squared < 52.6  # exceeded by 1 in 1,000


def test_padding_comes_from_the_start_of_the_permutation():
    plan = BatchPlan(10, 4, 1, 2, seed=0)
    batches = epoch_of(plan)
    tail = np.concatenate([batches[1, 0, rank][0] for rank in range(2)])
    weights = np.concatenate([batches[1, 0, rank][1] for rank in range(2)])
    order = plan.draw_keys(0)
    np.testing.assert_array_equal(tail, np.concatenate([order[8:], order[:6]]))
    np.testing.assert_array_equal(weights, [1, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("first_step", [0, 1, 3, 4])
def test_keys_from_a_step_are_the_rest_of_the_epoch(first_step):
    plan = BatchPlan(70, 4, 2, 2, seed=0)
    rest = list(plan.epoch_keys(5, 1, first_step))
    whole = list(plan.epoch_keys(5, 1))[first_step * plan.accumulation_steps :]
    assert len(rest) == len(whole)
    for first, second in zip(rest, whole, strict=True):
        np.testing.assert_array_equal(first.indices, second.indices)
        np.testing.assert_array_equal(first.weights, second.weights)


@pytest.mark.parametrize(("samples", "batch", "world"), list(itertools.product((1, 5, 32, 97), (1, 8), (1, 2, 3, 8))))
def test_evaluation_sees_every_sample_once_in_equal_batches(samples, batch, world):
    plan = EvaluationPlan(samples, batch, world)
    totals = np.zeros(samples)
    for rank in range(world):
        keys = list(plan.epoch_keys(0, rank))
        assert len(keys) == plan.batches_per_rank
        for key in keys:
            assert key.indices.shape == key.weights.shape == (batch,)
            np.add.at(totals, key.indices, key.weights)
    np.testing.assert_array_equal(totals, np.ones(samples))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_batches_of_an_evaluation_are_the_same_on_any_number_of_ranks(world):
    """97 samples are 13 batches of 8, and then batches of padding alone."""
    alone, ranks = list(EvaluationPlan(97, 8, 1).epoch_keys(0, 0)), EvaluationPlan(97, 8, world)
    keys = [key for row in zip(*(ranks.epoch_keys(0, rank) for rank in range(world)), strict=True) for key in row]
    for first, second in zip(alone, keys, strict=False):
        np.testing.assert_array_equal(first.indices, second.indices)
        np.testing.assert_array_equal(first.weights, second.weights)
    assert not any(key.weights.any() for key in keys[len(alone) :])


def in_order(epoch: int, window: int, seed: int = 1) -> np.ndarray:
    """Return the samples of an epoch by shards."""
    return BatchPlan(101, 8, 1, 1, seed, places=PLACES, window=window).draw_keys(epoch)


def test_an_epoch_by_shards_shuffles_the_shards_and_the_samples_within_a_window():
    """A window of 1 moves no sample; another moves each by less than a window, those of the end to the beginning."""
    orders = set()
    for epoch in range(20):
        whole = in_order(epoch, 1)
        groups = [[*group] for _, group in itertools.groupby(whole.tolist(), key=lambda index: PLACES[index, 0])]
        assert len(groups) == 9, "each shard is read at one go"
        assert all(np.all(np.diff(PLACES[group, 1]) > 0) for group in groups)
        orders.add(tuple(PLACES[group[0], 0] for group in groups))
        mixed = in_order(epoch, 20)
        np.testing.assert_array_equal(np.sort(mixed), np.arange(101))
        moved = (np.argsort(mixed) - np.argsort(whole)) % 101
        assert np.all(np.minimum(moved, 101 - moved) < 2 * 20)
        assert (mixed == whole).mean() < 0.3
    assert len(orders) == 20
    np.testing.assert_array_equal(in_order(3, 20), in_order(3, 20))
    assert (in_order(3, 20) != in_order(3, 20, seed=2)).mean() > 0.9


def test_a_window_of_all_samples_makes_every_order_equally_likely():
    places = np.array([[0, 0], [1, 0], [1, 5]])
    plans = [BatchPlan(3, 1, 1, 1, seed, places=places, window=9) for seed in range(1200)]
    counts = Counter(tuple(plan.draw_keys(0).tolist()) for plan in plans)
    assert len(counts) == 6
    assert chisquare([*counts.values()]).pvalue > 0.001
