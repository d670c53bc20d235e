"""Our engine at ZeRO 1, 2 and 3 against plain PyTorch, on real gloo ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy.special
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    confusion_matrix,
    log_loss,
    roc_auc_score,
    top_k_accuracy_score,
)
from sklearn.preprocessing import label_binarize

from tests.kit import ROUNDING, assert_same_but_rounding, share_apart
from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES

VARIANTS = [*product(STRATEGIES, ENGINES)]
RANKS = "tests.training.engine_ranks"
RULES = ("adamw", "sgd")
WHOLE = ("lamb", "lars", "muon")  # which compute with whole parameters
# Of timm's others one with all that a state may have, and one whose state does not begin with zeros.
MORE_RULES = ("adan", "madgrad")
PRECISIONS = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@pytest.fixture(scope="module")
def run_cases(run_on_ranks):
    """Run a function of engine_ranks once for all values of its parameters: {values: result of each rank}."""

    def run(function: str, world_size: int = 2, fixed: dict | None = None, **parameters) -> dict:
        keys = list(product(*parameters.values()))
        cases = [dict(zip(parameters, key, strict=True)) | (fixed or {}) for key in keys]
        results = run_on_ranks(f"{RANKS}:{function}", world_size, cases)
        return {key: [rank[number] for rank in results] for number, key in enumerate(keys)}

    return run


@pytest.fixture(scope="module")
def oracle(run_cases):
    return run_cases("train_with_plain_pytorch", optimizer=(*RULES, *MORE_RULES, *WHOLE), fixed={"steps": 5})


@pytest.fixture(scope="module")
def ours(run_cases):
    rules = (*RULES, *MORE_RULES)
    return run_cases("train_with_engine", strategy=STRATEGIES, engine=ENGINES, optimizer=rules, fixed={"steps": 5})


@pytest.mark.parametrize("rule", [*RULES, *MORE_RULES])
@pytest.mark.parametrize(("strategy", "engine"), VARIANTS)
def test_losses_and_weights_equal_plain_ddp(strategy, engine, rule, ours, oracle):
    expected, result = oracle[(rule,)][0], ours[strategy, engine, rule][0]
    assert_same_but_rounding(result, expected)
    assert np.ptp(expected["losses"]) > 1e-3, "the weights must have moved for this to mean anything"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage3"])
def test_an_optimizer_that_restarts_is_a_new_one(strategy, run_cases):
    """With moments that do not begin with zeros, and with a count in bias corrections."""
    fixed, rules = {"steps": 5, "restart_at": 3}, ("adamw", "madgrad")
    oracle = run_cases("train_with_plain_pytorch", optimizer=rules, fixed=fixed)
    ours = run_cases("train_with_engine", engine=ENGINES, optimizer=rules, fixed=fixed | {"strategy": strategy})
    for (_, rule), (report, _) in ours.items():
        assert_same_but_rounding(report, oracle[(rule,)][0])


@pytest.mark.parametrize("rule", WHOLE)
def test_rules_of_whole_parameters_equal_plain_ddp(rule, run_cases, oracle):
    # Muon computes in bf16, which makes more of rounding errors than other rules do.
    tolerance = 10 * ROUNDING if rule == "muon" else ROUNDING
    reports = run_cases("train_with_engine", fixed={"steps": 5, "optimizer": rule, "engine": "torch"})[()]
    for report, expected in zip(reports, oracle[(rule,)], strict=True):
        assert_same_but_rounding(report["losses"], expected["losses"], tolerance)
        if rule != "muon":
            assert_same_but_rounding(report["weights"], expected["weights"])
        assert np.ptp(expected["losses"]) > 1e-3


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_memory_of_training_40_matrices(rule, run_cases):
    """In models' sizes: sums, gradients, what the rule computes with, and 50 MB of code that the first step loads.

    When the tests sent each matrix with the whole buffer that it is a view of, putting them together took 430.
    """
    for report in run_cases("memory_report", fixed={"optimizer": rule})[()]:
        assert max(report.values()) < 30, report


def test_collectives_give_the_bits_of_shared_memory(run_cases, ours):
    for (rule,), ranks in run_cases("train_over_collectives", optimizer=RULES, fixed={"steps": 5}).items():
        assert ranks == ours["ddp", "torch", rule]


@pytest.mark.parametrize("world_size", [1, 3])
def test_sharded_blocks_train_heads_first_as_whole_ones_do(world_size, run_cases):
    """Blocks sharded apart and recomputed, a frozen and an unused parameter, offload; whole and uneven rows."""
    fixed = {"strategy": "ddp", "engine": "torch"}
    expected = run_cases("train_blocks", world_size, fixed=fixed)[()][0]
    assert np.ptp(expected["losses"]) > 1e-3, "the weights must have moved for this to mean anything"
    for report in run_cases("train_blocks", world_size, fixed=fixed | {"over_collectives": True})[()]:
        assert report == expected, "the two ways of exchange"
    cases = [("fsdp_stage2", "optimizer"), ("fsdp_stage3", "none"), ("fsdp_stage3", "all")]
    for strategy, offload in cases:
        case = {"strategy": strategy, "offload": offload, "engine": "torch"}
        for report in run_cases("train_blocks", world_size, fixed=case)[()]:
            assert_same_but_rounding(report, expected)


@pytest.mark.parametrize("strategy", ["fsdp_stage2", "fsdp_stage3"])
def test_a_block_that_is_sharded_is_whole_no_longer(strategy, run_cases):
    for sizes, left in run_cases("whole_bytes_while_sharding", fixed={"strategy": strategy})[()]:
        assert left == [sum(sizes[number:]) for number in range(1, 4)]


def test_machines_of_different_sizes_cannot_replicate_each_other(run_cases):
    for report in run_cases("uneven_machines")[()]:
        assert report.startswith("--replicate-across nodes: the machines have 1 and 2 ranks")


@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": rule} for rule in ("adamw", "lamb", "muon")),
        {"precision": "bf16"},
        {"strategy": "fsdp_stage3", "optimizer": "adamw"},
        {"strategy": "fsdp_stage3", "precision": "bf16"},
        {"strategy": "fsdp_stage2"},
        *(pytest.param({"optimizer": rule}, marks=pytest.mark.slow) for rule in ("sgd", *MORE_RULES, "lars")),
        *(
            pytest.param({"strategy": "fsdp_stage3", "optimizer": rule}, marks=pytest.mark.slow)
            for rule in ("sgd", *MORE_RULES)
        ),
    ],
    ids=lambda changes: " ".join(changes.values()),
)
def test_any_number_of_ranks_computes_the_same_bytes(changes, run_cases):
    """6 leaves: one rank with all, two with 3 each, which are no subtree, three with 2; both ways of exchange.

    And each rank has its part of the optimizer's state alone.
    """
    ways = (False, True) if changes.get("strategy", "ddp") == "ddp" else (False,)
    digests, elements = set(), set()
    for size in (1, 2, 3):
        for ranks in run_cases("train_leaves", size, over_collectives=ways, fixed={"leaves": 6} | changes).values():
            digests |= {digest for digest, _ in ranks}
            elements.add(sum(updated for _, updated in ranks))
            assert max(updated for _, updated in ranks) < (1 if size == 1 else 0.9) * sum(u for _, u in ranks) + 1
    assert len(digests) == len(elements) == 1


def test_replicas_of_shards_compute_the_same_bytes(run_cases):
    """8 leaves on one rank, and on two replicas of two shards each."""
    fixed = {"leaves": 8, "strategy": "fsdp_stage3"}
    (alone,) = run_cases("train_leaves", 1, fixed=fixed)[()]
    replicas = run_cases("train_leaves", 4, fixed=fixed | {"replicate_across": "nodes"})[()]
    assert {digest for digest, _ in replicas} == {alone[0]}


@pytest.mark.parametrize("engine", ["deepspeed", "torch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_equals_more_ranks(strategy, engine, run_cases):
    """1 rank x 2 micro-steps = 2 ranks x 1: the same samples, the same gradient (no BatchNorm)."""
    fixed = {"steps": 3, "with_batchnorm": False, "engine": engine, "strategy": strategy}
    wide = run_cases("train_with_engine", 2, fixed=fixed)[()][0]
    deep = run_cases("train_with_engine", 1, fixed=fixed | {"accumulation": 2})[()][0]
    assert_same_but_rounding(wide["weights"], deep["weights"])


@pytest.fixture(scope="module")
def precision_reports(run_cases):
    return run_cases("precision_report", strategy=STRATEGIES, engine=ENGINES, precision=PRECISIONS)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("strategy", "engine"), VARIANTS)
def test_low_precision_keeps_weights_and_statistics_in_fp32(strategy, engine, precision, precision_reports):
    report = precision_reports[strategy, engine, precision][0]
    assert report["convolution_output"] == [PRECISIONS[precision]]
    is_gathered_as_computed = engine == "torch" and strategy != "ddp"
    assert report["gathered"] == [PRECISIONS[precision if is_gathered_as_computed else "fp32"]]
    assert report["weights"] == report["live"] == ["torch.float32"]
    assert report["loss_scale"] == (2.0**16 if precision == "fp16" else None)
    exact = precision_reports[strategy, engine, "fp32"][0]
    np.testing.assert_allclose(report["losses"], exact["losses"], atol=0.02)


def assert_no_trace(report, good_steps=2):
    """A skipped step changed nothing but the loss scale, and the run goes on as one that never took it."""
    before, after, later, undisturbed = (report[key] for key in ("before", "after", "later", "undisturbed"))
    assert before["weights"] == after["weights"]
    assert share_apart(after["weights"], later["weights"]) > 0
    is_fp16 = before["loss_scale"] is not None
    if is_fp16:
        assert [before["loss_scale"], after["loss_scale"]] == [2.0**16, 2.0**15]
    assert share_apart(later["weights"], undisturbed["weights"]) <= (ROUNDING if is_fp16 else 0)
    assert [state["applied_steps"] for state in (before, after, later)] == [good_steps, good_steps, good_steps + 2]


@pytest.fixture(scope="module")
def nan_reports(run_cases):
    return run_cases("nan_report", strategy=STRATEGIES, engine=ENGINES, precision=("fp32", "fp16"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("strategy", "engine"), VARIANTS)
def test_nan_on_one_rank_skips_the_step_on_all(strategy, engine, precision, nan_reports):
    for report in nan_reports[strategy, engine, precision]:
        assert_no_trace(report)


@pytest.mark.parametrize(("strategy", "engine"), [("ddp", "torch"), ("fsdp_stage3", "torch")])
def test_a_verdict_that_stays_on_the_device_changes_nothing_else(strategy, engine, run_cases, ours):
    for rule in ("adamw", "sgd"):
        case = {"strategy": strategy, "optimizer": rule, "engine": engine, "steps": 5, "defers_verdict": True}
        assert run_cases("train_with_engine", fixed=case)[()] == ours[strategy, engine, rule]
    fixed = {"precision": "fp32", "engine": engine, "strategy": strategy, "defers_verdict": True}
    for (_, good_steps), reports in run_cases(
        "nan_report", optimizer=("adamw", "sgd"), good_steps=(0, 2), fixed=fixed
    ).items():
        for report in reports:
            assert_no_trace(report, good_steps)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "engine"), VARIANTS)
def test_a_compiled_model_has_the_same_losses(strategy, engine, run_cases, oracle):
    """Not the same weights: where a gradient is all rounding, Adam steps by the learning rate in either direction."""
    case = {"steps": 5, "optimizer": "adamw", "strategy": strategy, "engine": engine, "compile": "on"}
    expected = oracle[("adamw",)][0]["losses"]
    for report in run_cases("train_with_engine", fixed=case)[()]:
        assert_same_but_rounding(report["losses"], expected)


CHANGES = [  # strategy and engine of the first steps, and of the last
    *(variant * 2 for variant in VARIANTS),
    ("ddp", "deepspeed", "fsdp_stage3", "deepspeed"),
    ("fsdp_stage3", "deepspeed", "fsdp_stage2", "deepspeed"),
    ("fsdp_stage3", "torch", "fsdp_stage2", "deepspeed"),
    ("fsdp_stage3", "deepspeed", "ddp", "torch"),
    ("ddp", "torch", "fsdp_stage2", "torch"),
    ("fsdp_stage2", "torch", "fsdp_stage3", "torch"),
]


# Each change with AdamW, our engine under ddp with all of them; what is left in `make test-slow`.
RESUMED = {"adamw": CHANGES, **{rule: [("ddp", "torch") * 2] for rule in ("lamb", "muon", "sgd", "madgrad")}}
OTHERS = [(change, rule) for rule in ("sgd", "madgrad") for change in CHANGES if change not in RESUMED[rule]]


@pytest.fixture(scope="module")
def resume_reports(run_cases):
    """A function from a change and a rule to what `resume_report` says of them; the usual ones are run at once."""
    known = {}
    for rule, changes in RESUMED.items():
        known |= run_cases("resume_report", change=changes, optimizer=[rule])

    def report_of(change, rule):
        return known.get((change, rule)) or run_cases("resume_report", change=[change], optimizer=[rule])[change, rule]

    return report_of


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        *((change, rule) for rule, changes in RESUMED.items() for change in changes),
        *(pytest.param(change, rule, marks=pytest.mark.slow) for change, rule in OTHERS),
    ],
)
def test_state_read_and_written_goes_on_as_if_nothing_had_happened(change, rule, resume_reports):
    whole, split = resume_reports(change, rule)[0]
    if change[:2] == change[2:] or change == ("fsdp_stage2", "torch", "fsdp_stage3", "torch"):
        assert whole == split, "must be bit-identical"
    assert_same_but_rounding(split, whole)


def test_an_epoch_with_a_remainder_equals_plain_pytorch(run_cases):
    """37 samples over 2 ranks x 2 micro-steps x 8: every sample counts once, the last step is the mean over its 5."""
    oracle = run_cases("epoch_with_plain_pytorch", 1, fixed={"global_batch": 32})[()][0]
    for variant, ranks in run_cases("epoch_with_our_loop", strategy=STRATEGIES, engine=ENGINES).items():
        for report in ranks:
            for what in ("weights", "loss"):
                assert_same_but_rounding(report[what], oracle[what], msg=f"{variant}: {what}")
            assert (report["top1"], report["n"]) == (pytest.approx(oracle["top1"], abs=1e-12), 37)


def test_accuracy_of_mixed_images_is_counted_on_their_own_labels(run_cases):
    (report,) = run_cases("accuracy_of_mixed_images", 1)[()]
    assert report["top1"] == pytest.approx(report["by_own_labels"], abs=1e-12)
    assert report["by_heaviest_targets"] != report["by_own_labels"], "the images must be mixed"


def test_buffers_are_averaged_over_the_leaves_of_all_ranks(run_cases):
    reports = run_cases("batchnorm_average_report")[()]
    for name in reports[0]["before"]:
        leaves = [np.array(leaf) for report in reports for leaf in report["before"][name]]
        if "num_batches" not in name:
            assert np.abs(np.diff(leaves, axis=0)).max() > 1e-4, "the leaves must have seen different data"
        for leaf in (leaf for report in reports for leaf in report["after"][name]):
            assert_same_but_rounding(leaf, np.mean(leaves, axis=0))


def test_evaluation_is_exact_on_any_number_of_ranks(run_cases):
    """360 samples in batches of 8: full on 1 rank, padded on 2 and 3."""
    reports = {size: run_cases("evaluation_report", size)[()] for size in (1, 2, 3)}
    single = reports[1][0]
    labels, logits = np.array(single["labels"]), np.array(single["logits"])
    probabilities = scipy.special.softmax(logits.astype(np.float64), axis=1)
    loss, top1, top5, samples = single["scores"]
    assert samples == 360
    assert top1 == pytest.approx(accuracy_score(labels, logits.argmax(1)), abs=1e-12)
    assert top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5), abs=1e-12)
    assert loss == pytest.approx(log_loss(labels, probabilities), rel=ROUNDING)
    np.testing.assert_array_equal(single["confusion"], confusion_matrix(labels, logits.argmax(1)))
    truth = label_binarize(labels, classes=range(probabilities.shape[1]))
    areas = [score(truth, probabilities, average="macro") for score in (roc_auc_score, average_precision_score)]
    assert single["areas"] == pytest.approx(areas, abs=1e-6)
    for ranks in reports.values():
        for report in ranks:
            assert report["scores"] == single["scores"]
            assert report["areas"] == single["areas"]
            assert report["confusion"] == single["confusion"]
