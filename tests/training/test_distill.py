"""`--distill` as a user trains with it: the teacher's answers to the very images, the same bytes on any ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from commands import assert_success, assert_user_error, launch, train_here
from torch import nn

from tests.kit import ALONE, new_model
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.tasks.teacher.network import Teacher, load_teacher

DATA = ("--data", "digits", "--image-size", "8", "--report", "false", "--tensorboard", "false", "--shift-pixels", "1")
STUDENT = ("--epochs", "2", "--mixup", "0.2", "--save-every-steps", "15", "--keep-last", "99", "--distill", "kl:4:0.7")
STUDENT = (*STUDENT, "--threads-per-rank", "1")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A folder of runs with two teachers, which differ by their seed, and a student of the first."""
    folder = tmp_path_factory.mktemp("logs")
    logs = ("--log-dir", str(folder), "--model-type", "basic_cnn", "--batch-size", "32", *DATA)
    for seed in "01":
        assert_success(train_here(*logs, "--epochs", "1", "--seed", seed, "--run-name", f"teacher{seed}"))
    assert_success(train_here(*logs, *STUDENT, "--teacher", "teacher0", "--run-name", "student"))
    return folder, logs


def test_a_resumed_student_has_the_same_bytes_and_another_teacher_is_refused(teachers):
    folder, logs = teachers
    runs = folder / "runs"
    checkpoint = ("--resume", str(runs / "student" / "checkpoints" / "step-00001-0000015"))
    given = (*logs, *STUDENT, *checkpoint, "--run-name", "resumed", "--teacher")
    assert_user_error(train_here(*given, "teacher1"), "was made with another teacher")
    assert_success(train_here(*given, str(runs / "teacher0" / WEIGHTS)))  # the same one by another name
    assert (runs / "resumed" / WEIGHTS).read_bytes() == (runs / "student" / WEIGHTS).read_bytes()


def test_a_teacher_is_found_by_its_name_beside_a_run_that_gets_one(teachers):
    _, logs = teachers
    assert_success(train_here(*logs, "--distill", "kl:4", "--teacher", "teacher0", "--epochs", "1"))


UNCHANGED = ("--augmentation", "none", "--shift-pixels", "0", "--mixup", "0", "--teacher", "teacher0")
ANSWERED = "answered 1437 images"


def test_a_teacher_that_answers_once_leaves_the_same_bytes(teachers, monkeypatch):
    folder, logs = teachers
    runs, given, answered = folder / "runs", (*logs, *STUDENT, *UNCHANGED, "--run-name"), []
    answer = Teacher.answer

    def counted(self, images):
        answered.append(len(images))
        return answer(self, images)

    monkeypatch.setattr(Teacher, "answer", counted)
    done = train_here(*given, "kept")
    assert ANSWERED in done.stdout
    assert sum(answered) == 45 * 32 + 32, "each batch of an epoch once, and one to compare"
    done = train_here(*given, "kept-resumed", "--resume", str(runs / "kept" / "checkpoints" / "step-00000-0000030"))
    assert ANSWERED in done.stdout
    with monkeypatch.context() as patch:
        patch.setattr("zerovision.training.tasks.teacher.network.MOST_KEPT_BYTES", 0)
        assert ANSWERED not in train_here(*given, "anew").stdout
    with monkeypatch.context() as patch:  # a place in the batch that counts
        patch.setattr(
            Teacher, "answer", lambda self, images: answer(self, images).mul_(1 + 1e-7 * torch.arange(32.0)[:, None])
        )
        assert "they are computed in every epoch" in train_here(*given, "uneven").stdout
    found = [(runs / name / WEIGHTS).read_bytes() for name in ("kept", "kept-resumed", "anew")]
    assert found[0] == found[1] == found[2] != (runs / "uneven" / WEIGHTS).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kept", "audit"), [("ddp", UNCHANGED, ("--audit", "3")), ("fsdp_stage3", (), ())])
def test_two_ranks_leave_the_same_bytes(teachers, strategy, kept, audit):
    """Whether or not the teacher answers once, also in a run that goes on with more than an epoch, and is audited."""
    folder, _ = teachers
    flags = (*DATA, *STUDENT, "--log-dir", str(folder), "--teacher", "teacher0", *kept, "--run-name")
    runs = [folder / "runs" / f"{strategy}-{name}" for name in ("1", "2", "2-resumed")]
    resume = ("--resume", str(runs[1] / "checkpoints" / "step-00000-0000030"))
    for run, more in zip(runs, (("--gradient-accumulation-steps", "2"), audit, resume), strict=True):
        done = assert_success(launch("basic_cnn", strategy, run.name.split("-")[1], "16", "2", *flags, run.name, *more))
        assert (ANSWERED in done.stdout) == bool(kept)
        assert "computed wrong" not in done.stdout
    found = [(run / WEIGHTS).read_bytes() for run in runs]
    assert found[0] == found[1] == found[2]


def test_a_step_is_that_of_a_plain_loop(teachers, monkeypatch):
    """Two steps of SGD: plain PyTorch repeats them on the images that the run saw, and ends at the same weights.

    No more: two values that a maximum is taken of may be equal but for their last bit, by which kernels differ, and
    part all that follows: six steps were apart by a hundred-thousandth to more than a fiftieth of their way, as the
    processor's instructions happened to be. What counts is how far each tensor went, not each of its weights.
    """
    from zerovision.training.tasks import labels

    folder, logs = teachers
    seen, build_loss = [], labels.build_loss

    def spied(*arguments, **more):
        loss = build_loss(*arguments, **more)

        def losses(logits, batch):
            targets = batch.labels if batch.targets is None else batch.targets
            seen.append((batch.images.clone(), targets.clone(), batch.weights.clone()))
            return loss(logits, batch)

        return losses

    monkeypatch.setattr(labels, "build_loss", spied)
    plain = ("--optimizer", "sgd:0", "--weight-decay", "0", "--gradient-clipping", "0")
    plain += ("--schedule", "constant", "--warmup-epochs", "0", "--learning-rate", "0.05", "--dropout", "0")
    start = ("--weights", str(folder / "runs" / "teacher1" / WEIGHTS))
    student = (*logs, *plain, *start, *STUDENT, "--epochs", "1", "--label-smoothing", "0", "--batch-size", "720")
    assert_success(train_here(*student, "--teacher", "teacher0", "--run-name", "plain"))
    module, first = (load_model(folder / "runs" / "teacher1" / WEIGHTS)[0].train() for _ in range(2))
    teacher, _ = load_model(folder / "runs" / "teacher0" / WEIGHTS)
    for dropout in (each for each in module.modules() if isinstance(each, nn.Dropout)):
        dropout.p = 0
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for images, targets, weights in seen:
        logits = module(images)
        with torch.no_grad():
            told = (teacher(images) / 4).softmax(1)
        divergence = (told * (told.log() - (logits / 4).log_softmax(1))).sum(1) * 16
        labels = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        optimizer.zero_grad()
        ((0.7 * divergence + 0.3 * labels) * weights).sum().div(weights.sum()).backward()
        optimizer.step()
    found = load_model(folder / "runs" / "plain" / WEIGHTS)[0].state_dict()
    before = first.state_dict()
    for name, expected in module.state_dict().items():
        went, apart = (expected - before[name]).float().norm(), (found[name] - expected).float().norm()
        assert apart <= 0.02 * went, name


def test_a_teacher_gets_its_own_normalization_and_answers_in_the_order_of_the_data():
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 3))
    own, given = torch.tensor([[[0.5] * 3, [0.2] * 3], [[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]]], dtype=torch.float64)
    pixels = torch.rand(5, 3, 2, 2)
    seen, wanted = ((pixels - mean[:, None, None]) / std[:, None, None] for mean, std in (given.float(), own.float()))
    expected = module.eval()(wanted)[:, [2, 0]]
    teacher = Teacher(module.train(), torch.tensor([2, 0]), own, given, "fp32")
    torch.testing.assert_close(teacher.answer(seen), expected)
    assert not teacher.answer(seen).requires_grad
    first, module[3].bias.data[0] = teacher.digest, 7.0
    assert Teacher(module, torch.tensor([2, 0]), own, given, "fp32").digest != first


@pytest.fixture
def published(monkeypatch):
    """Let `timm:test_resnet` have so many classes, of these names, with random weights; the hub is not asked."""

    def publish(classes, names=None):
        built = new_model("timm:test_resnet", num_classes=classes, image_size=8)
        facts = {"num_classes": classes, "label_names": names, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        monkeypatch.setattr("zerovision.training.tasks.teacher.network.build_model", lambda *_, **__: built)
        monkeypatch.setattr("zerovision.training.tasks.teacher.network.published_config", lambda _: facts)

    return publish


def test_the_classes_of_published_weights_are_told_by_name(teachers, published, tmp_path):
    """Not by their number: 10 classes are no digits, and 1,000 no wnids."""
    given = (
        *teachers[1],
        *STUDENT[:2],
        "--distill",
        "kl:1",
        "--teacher",
        "timm:test_resnet",
        "--run-name",
        "published",
    )
    published(10)
    assert_user_error(train_here(*given), "has no names for its 10 classes", "use --teacher-classes FILE")
    published(1000)
    assert_user_error(train_here(*given), "has no output for 10 of the 10 classes, such as '0'", "such as 'n01440764'")
    (names := tmp_path / "names.txt").write_bytes(b"\xef\xbb\xbf0\r\n2 \r\n1\r\n")
    assert_user_error(train_here(*given, "--teacher-classes", str(names)), "has 3 lines", "1,000 outputs")
    published(3)
    assert_user_error(
        train_here(*given, "--teacher-classes", str(names)), "has no output for 7 of the 10", "such as '3'"
    )
    assert_user_error(train_here(*given, "--teacher-classes", str(tmp_path)), "cannot be read")
    published(10)
    names.write_text("".join(f"{n}\n" for n in range(10)))
    done = assert_success(train_here(*given, "--teacher-classes", str(names)))
    told = "--teacher timm:test_resnet was trained on images resized by bicubic, here by bilinear (--interpolation)"
    assert done.stdout.count(told) == 1


def test_a_teacher_answers_in_the_order_of_the_data_however_its_own_are_named(teachers, published, tmp_path):
    """By its own names, or those of the file; another order is another teacher."""
    config = TrainConfig(teacher="timm:test_resnet", distill="kl:1", image_size=8)
    train = SimpleNamespace(sizes=[8], source=SimpleNamespace(in_memory=True))
    digits = SimpleNamespace(class_names=[*"0123"], train=train)
    digits.preprocessing = Preprocessing(8, None, mean=(0.5,) * 3, std=(0.5,) * 3)
    images, alone = torch.randn(3, 3, 8, 8), ALONE
    (names := tmp_path / "names.txt").write_text("1\n3\n0\nnine\n2\n")
    found = []
    for own, given in ((["1", "3", "0", "nine", "2"], config), (None, replace(config, teacher_classes=str(names)))):
        torch.manual_seed(0)
        published(5, own)
        teacher = load_teacher(given, digits, "fp32", alone)
        torch.testing.assert_close(teacher.answer(images), teacher._network(images)[:, [2, 0, 4, 1]])
        found.append(teacher.digest)
    names.write_text("1\n3\n2\nnine\n0\n")
    found.append(load_teacher(replace(config, teacher_classes=str(names)), digits, "fp32", alone).digest)
    assert len({*found}) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--distill", "kl:4", "--teacher", "timm:resnet18"), ("--teacher", "resnet18")),
        (
            ("--distill", "kl:4", "--teacher", "teacher0", "--image-channels", "1"),
            ("needs images with 3 channels",),
        ),
    ],
)
def test_a_mistake_is_one_line(teachers, flags, words):
    folder, logs = teachers
    name = "refused-" + "-".join(flags[1::2]).replace(":", "-")
    assert_user_error(train_here(*logs, *flags, "--run-name", name), *words)
    assert not (folder / "runs" / name / WEIGHTS).exists()
