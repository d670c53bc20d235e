"""A Slurm job: what it adds to the arguments, and whether it is requeued. The job itself runs in tests/cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from zerovision.launch import slurm
from zerovision.launch.slurm import Job, JobRecord, JobState, training_arguments, what_follows
from zerovision.training.base.errors import UserError
from zerovision.training.world.launchers import job_port

ARGUMENTS = ["--model-type=mobilenet", "--strategy=ddp"]
JOB = Job("77", "77", None, 0, 2, "node[01-02]", 8)
TASK = replace(JOB, name="70-3", task=3)


def arguments(job: Job | None, *flags: str, model: str = "mobilenet") -> list[str]:
    """The words that the training entry is given beyond model and strategy."""
    return training_arguments([f"--model-type={model}", ARGUMENTS[1], *flags], job)[0][2:]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": ""}, None),
        (
            {
                "SLURM_JOB_ID": "77",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[01-02]",
                "SLURM_GPUS_ON_NODE": "8",
            },
            JOB,
        ),
        (
            {
                "SLURM_JOB_ID": "74",
                "SLURM_ARRAY_JOB_ID": "70",
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_RESTART_COUNT": "2",
                "SLURM_JOB_NODELIST": "a1,b-2",
            },
            Job("74", "70-3", 3, 2, 1, "a1,b-2", None),
        ),
    ],
)
def test_a_job_is_read_from_slurms_variables(variables: dict[str, str], expected: Job | None) -> None:
    assert Job.of(variables) == expected


def test_jobs_meet_on_ports_of_their_own() -> None:
    ports = {job_port(number) for number in range(500, 10500)}
    assert len(ports) == 10000
    assert min(ports) >= 1024
    assert max(ports) < 32768  # from there on the kernel gives ports to whoever asks


def test_more_ranks_than_gpus_are_refused() -> None:
    JOB.check_gpus(8)
    replace(JOB, gpus=None).check_gpus(9)
    with pytest.raises(UserError, match="--gpus-per-node=9"):
        JOB.check_gpus(9)


def test_a_job_names_its_run_and_goes_on_with_it() -> None:
    assert arguments(JOB) == ["--run-name=slurm-77", "--resume=auto"]
    assert arguments(TASK) == ["--run-name=slurm-70-3", "--resume=auto"]
    assert arguments(None) == []


def test_what_the_user_gives_stays() -> None:
    given = ["--run-name", "digits", "--resume", "never"]
    assert arguments(JOB, *given) == given
    given = ["--run-name=digits", "--resume=must"]
    assert arguments(JOB, *given) == given


def test_a_requeued_job_goes_on_with_its_own_run_if_it_has_one(tmp_path: Path) -> None:
    requeued = replace(JOB, restarts=1)
    given = ["--log-dir", str(tmp_path), "--run-name=digits"]
    assert arguments(requeued, *given, "--resume", "never")[-1] == "--resume=auto"
    elsewhere = [*given, "--resume", str(tmp_path / "other")]
    assert arguments(requeued, *elsewhere) == elsewhere
    checkpoints = tmp_path / "runs" / "digits" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last").write_text("step-00001-0000000")
    assert arguments(requeued, *elsewhere) == [*elsewhere, "--resume=auto"]
    assert arguments(JOB, *elsewhere) == elsewhere


def test_tasks_of_an_array_get_their_number_and_model() -> None:
    words = arguments(TASK, "--seed", "{task}", "--run-name=s{task}")
    assert words[:3] == ["--seed", "3", "--run-name=s3"]
    four = "mobilenet,vgg,efficientnet,basic_cnn"
    assert training_arguments([f"--model-type={four}"], TASK)[1].model_type == "basic_cnn"


@pytest.mark.parametrize(
    ("job", "flags", "model", "said"),
    [
        (JOB, ["--seed", "{task}"], "mobilenet", "--array=0-3"),
        (JOB, [], "mobilenet,vgg", "--array=0-1"),
        (TASK, [], "mobilenet,vgg", "2 models"),
        (TASK, ["--run-name", "digits"], "mobilenet", "different names"),
        (TASK, ["--run-name", "digits33"], "mobilenet", "different names"),
    ],
)
def test_what_cannot_be_is_refused(job: Job, flags: list[str], model: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        arguments(job, *flags, model=model)


def follow(*starts: tuple[int, str, int], state: JobState = JobState.RUNNING) -> list[bool]:
    """Whether a job is requeued after each of its starts: (exit code, reason, newest checkpoint of the start)."""
    record, requeued = JobRecord(), []
    for code, reason, position in starts:
        _, kept = what_follows(JobRecord(code, reason, position), record, state)
        requeued.append(kept is not None)
        record = kept or record
    return requeued


HUNG, LOST = (124, "rank 1 hung", -1), (69, "node02 is lost: no sign of life for 11 s", -1)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, "", 9)], [False]),
        ([(2, "error", -1)], [False]),
        ([(65, "not finite", 9)], [False]),
        ([(74, "cannot save", 9)], [False]),
        ([(143, "", 9)], [False]),
        ([(138, "", 3), (138, "", 6), (138, "", 9)], [True, True, True]),
        ([(138, "", -1), (138, "", -1)], [True, False]),
        ([HUNG, HUNG], [True, False]),
        ([HUNG, LOST, HUNG], [True, True, False]),
        ([HUNG, (124, "rank 1 hung", 5), HUNG], [True, True, False]),
        ([HUNG, (138, "", 5), HUNG, HUNG], [True, True, True, False]),
        ([(124, "rank 1 hung", 5), (124, "rank 3 hung", 5)], [True, False]),
        ([LOST, (69, "node01 is lost: no sign of life for 12 s", -1)], [True, False]),
    ],
)
def test_a_job_is_requeued_as_long_as_it_makes_progress(starts: list, expected: list[bool]) -> None:
    assert follow(*starts) == expected


def test_a_preempted_job_is_requeued_and_a_cancelled_one_is_not() -> None:
    stopped = (143, "", 5)
    assert follow(stopped, stopped, stopped, state=JobState.PREEMPTED) == [True, True, True]
    assert follow((0, "", 5), state=JobState.PREEMPTED) == [False]
    assert follow((1, "node01 is lost", -1), state=JobState.ENDING) == [False]


@pytest.mark.parametrize(
    ("shown", "was_terminated", "state"),
    [
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=None", False, JobState.RUNNING),
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=None", True, JobState.ENDING),
        ("JobId=7 JobState=RUNNING PreemptTime=2026-11-21T21:30:08", True, JobState.PREEMPTED),
        ("JobId=7 JobState=COMPLETING PreemptTime=2026-11-21T21:30:08", True, JobState.ENDING),
        ("JobId=7 JobState=CANCELLED Reason=None PreemptTime=None", False, JobState.ENDING),
        ("", False, JobState.ENDING),
    ],
)
def test_what_slurm_does_with_a_job(shown: str, was_terminated: bool, state: JobState) -> None:
    assert JobState.of(shown, was_terminated=was_terminated) is state


def test_the_record_survives_and_a_broken_one_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "slurm" / "77.json"
    assert JobRecord.read(path) == JobRecord()
    record = JobRecord(124, "rank 1 hung", 5, ("rank N hung", "node lost"))
    record.write(path)
    assert JobRecord.read(path) == record
    path.write_text("{")
    assert JobRecord.read(path) == JobRecord()


def test_an_exception_of_the_launch_is_a_failure_like_any_other(monkeypatch, capsys) -> None:
    monkeypatch.setattr(slurm, "train", mock.Mock(side_effect=ZeroDivisionError("a bug")))
    record = slurm._train(mock.Mock(), mock.Mock(), [])
    assert record == JobRecord(1, "the launch failed with ZeroDivisionError")
    assert "a bug" in capsys.readouterr().err
    assert what_follows(record, JobRecord(), JobState.RUNNING)[1]
