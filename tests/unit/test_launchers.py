"""The bash launchers: what they print under DRY_RUN=1, and what they refuse."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.unit.launching import (
    CORES,
    HOSTFILE,
    LAUNCH,
    REPO_ROOT,
    SCRIPTS,
    WORDS,
    assert_refused,
    environment,
    launch,
    pretend_gpus,
    stub_repo,
    words_of,
)
from zerovision.launch import slurm
from zerovision.launch.arguments import LAUNCHERS, check_training, read_arguments, with_flags
from zerovision.launch.doctor import SOMETHING_WRONG_EXIT_CODE
from zerovision.launch.launch import main
from zerovision.launch.node_run import FINAL_CODES, HANG_CODE
from zerovision.training.base.errors import UserError
from zerovision.training.config import FIELDS, FLAG_OF

MAINS = {"launch_distributed.sh": main, "launch_multi_node.sh": main, "slurm_distributed.sh": slurm.main}


@pytest.mark.parametrize("folder", [REPO_ROOT, SCRIPTS, Path("/")])
def test_dry_run_prints_one_command_from_any_folder(folder: Path, tmp_path: Path) -> None:
    """Words with characters of the shell come through whole, and nothing of them is run."""
    nasty = f"a b;$(touch {tmp_path}/ran)`touch {tmp_path}/ran`\n'\"\\ *"
    script, flags = "launch_distributed.sh", ["--seed", "7", "--data", nasty]
    result = launch(script, [*WORDS[script], *flags], cwd=folder)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert result.stdout.count("\n") == 1
    own = ["--max-restarts=3", "--stop-timeout=300"]
    assert words_of(result.stdout)[1:] == [str(LAUNCH / "launch.py"), script, *WORDS[script], *own, *flags]
    assert not (tmp_path / "ran").exists()


def test_a_check_of_the_configuration_starts_no_rank() -> None:
    words = [*WORDS["launch_distributed.sh"], "--check-config"]
    result = launch("launch_distributed.sh", words, DRY_RUN="0")
    assert (result.returncode, words_of(result.stdout)[-1], result.stderr) == (0, "--check-config", ""), result
    assert_refused(launch("launch_distributed.sh", [*words, "--seed", "x"], DRY_RUN="0"), "--seed")


@pytest.mark.parametrize("flag", [["--max-restarts", "0"], ["--max-restarts=1000"], ["--max_restarts", "5"]])
def test_the_ranks_do_not_see_the_launchers_own_flags(flag: list[str]) -> None:
    own = ["--seed", "7", *flag, "--master-port=29555", "--data", "a_b"]
    given = read_arguments("launch_distributed.sh", [*WORDS["launch_distributed.sh"], *own], {})
    assert given.flags == ["--seed", "7", "--data", "a_b"]
    assert {"--master-port=29555", f"--max-restarts={flag[-1].split('=')[-1]}"} < {*given.command("launch.py")}


def test_help_tells_the_exit_codes() -> None:
    text = launch("launch_distributed.sh", ["--help"]).stdout
    codes = re.findall(r"^    (\d[0-9, ]*|128 \+ n) {2,}", text, flags=re.MULTILINE)
    assert {int(code) for line in codes if "n" not in line for code in line.split(",")} == {
        *(0, SOMETHING_WRONG_EXIT_CODE, HANG_CODE),
        *FINAL_CODES,
    }
    assert all(name in text for name in ("--max-restarts N", "MAX_RESTARTS", "128 + n"))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth99"}, "GLOO_SOCKET_IFNAME 'eth99': no interface 'eth99'; this machine has "),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            "RANK=0 and WORLD_SIZE=2, but LOCAL_RANK is not set: this is one of several pods, and each would train",
        ),
    ],
)
def test_what_the_variables_say_of_the_network_is_not_ignored(variables: dict[str, str], said: str) -> None:
    assert_refused(launch("launch_distributed.sh", WORDS["launch_distributed.sh"], DRY_RUN="0", **variables), said)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_mean_cpu_ranks(tmp_path: Path, visible: str) -> None:
    changes = {"PATH": pretend_gpus(tmp_path, 4), "CUDA_VISIBLE_DEVICES": visible, "DRY_RUN": "0"}
    result = launch("launch_distributed.sh", ["mobilenet", "ddp", str(CORES * 8 + 1), "16", "3"], **changes)
    assert_refused(result, "no GPU found")


def test_multi_node_prints_the_launch(tmp_path: Path) -> None:
    """With every variable as a flag, so that the line does the same in another shell."""
    (tmp_path / "hostfile.txt").write_text(HOSTFILE + "node-3 slots=8\n")
    own = ["--master_port", "29555", "--min-nodes", "1", "--allow-differences", "--seed", "7"]
    changes = {"MAX_RESTARTS": "0", "START_TIMEOUT": "9", "FORWARD_ENV": "A,B"}
    result = launch("launch_multi_node.sh", [*WORDS["launch_multi_node.sh"], *own], cwd=tmp_path, **changes)
    assert result.returncode == 0, result.stderr
    words = words_of(result.stdout)
    assert words[1:3] == [str(LAUNCH / "launch.py"), "launch_multi_node.sh"]
    assert words[3:9] == WORDS["launch_multi_node.sh"]
    assert set(words[9:-2]) == {
        *("--hosts=node-1,node-2", "--master-port=29555", "--min-nodes=1", "--allow-differences", "--max-restarts=0"),
        *("--stop-timeout=300", "--start-timeout=9", "--forward-env=A,B"),
    }
    assert words[-2:] == ["--seed", "7"]
    again = subprocess.run(words, env=environment(DRY_RUN="1"), cwd="/", capture_output=True, text=True, check=True)
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    ("flags", "variable", "hosts"),
    [
        (["--hostfile", "lab.txt"], "", "a,b"),
        (["--hostfile=lab.txt"], "lab.txt", "a,b"),
        ([], "lab.txt", "a,b"),
        ([], "", "node-1,node-2"),
        (["--hostfile="], "", ""),
        (["--hostfile"], "", ""),
        (["--hosts", "c,d"], "lab.txt", "c,d"),
    ],
)
def test_multi_node_takes_the_machines_of_a_hostfile(
    tmp_path: Path, flags: list[str], variable: str, hosts: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Named by flag, as the doctor takes it, or by variable; two different files, or none: errors.txt."""
    (tmp_path / "hostfile.txt").write_text(HOSTFILE)
    (tmp_path / "lab.txt").write_text("a slots=4\nb slots=4\n")
    words = [*WORDS["launch_multi_node.sh"], *flags]
    monkeypatch.chdir(tmp_path)
    for name, value in {"DRY_RUN": "1", "HOSTFILE": variable}.items():
        monkeypatch.setenv(name, value)
    if not hosts:
        with pytest.raises(UserError, match="hostfile"):
            main(["launch_multi_node.sh", *words])
        return
    assert main(["launch_multi_node.sh", *words]) == 0
    given = words_of(capsys.readouterr().out)
    assert f"--hosts={hosts}" in given
    if hosts != "c,d":
        assert not any("hostfile" in word for word in given)


@pytest.mark.parametrize("folder", ["", "scripts"])
def test_slurm_log_lies_in_logs_wherever_sbatch_was_typed(tmp_path: Path, folder: str) -> None:
    root = stub_repo(tmp_path)
    spool = tmp_path / "slurm_script"  # Slurm runs a copy of the script
    shutil.copy(SCRIPTS / "slurm_distributed.sh", spool)
    subprocess.run(
        ["bash", str(spool), *WORDS["slurm_distributed.sh"]],
        env=environment(DRY_RUN="1", SLURM_JOB_ID="77", SLURM_SUBMIT_DIR=str(root / folder)),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    words = words_of((root / "logs" / "slurm_distributed_77.out").read_text())
    assert words[1:3] == [str(root / "zerovision/launch/slurm.py"), "slurm_distributed.sh"]
    assert words[3:8] == WORDS["slurm_distributed.sh"]


def test_slurm_script_outside_a_job_says_sbatch() -> None:
    assert_refused(launch("slurm_distributed.sh", WORDS["slurm_distributed.sh"], DRY_RUN="0"), "sbatch")


SHARED_BY_8, SHARED_BY_2 = "8 ranks cannot share --global-batch 100 evenly", "--batch-size 16 x 2 ranks does not"


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a launcher up to the point at which ranks would start: what it refuses, '' if it does not."""
    (tmp_path / "hostfile.txt").write_text(HOSTFILE)
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.chdir(tmp_path)

    def run(script: str, batch_size: str, *flags: str) -> str:
        words = list(WORDS[script])
        words[-2] = batch_size
        try:
            return str(MAINS[script]([script, *words, f"--log-dir={tmp_path}", *flags]) or "")
        except UserError as error:
            return str(error)

    return run


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize(
    ("batch_size", "flags", "of_8", "of_2"),
    [
        ("16", ["--global-batch=100"], SHARED_BY_8, SHARED_BY_2),
        ("auto", ["--global-batch=100"], *(f"{n} ranks cannot share a global batch of 100 in mult" for n in (8, 2))),
        ("16", ["--global-batch=100", "--resume=auto", "--run-name=new"], SHARED_BY_8, SHARED_BY_2),
        ("16", ["--tensor-parallel=3"], *(f"{n} ranks cannot form groups of 3" for n in (8, 2))),
        ("16", ["--pipeline-parallel=2", "--global-batch=256"], "", ""),
        ("16", ["--global-batch=256"], "", ""),
        ("auto", [], "", ""),
    ],
)
def test_a_batch_that_the_ranks_cannot_share_is_refused_before_they_start(
    refusal: Callable[..., str], script: str, batch_size: str, flags: list[str], of_8: str, of_2: str
) -> None:
    said, expected = refusal(script, batch_size, *flags), of_8 if script == "launch_multi_node.sh" else of_2
    assert expected in said
    assert bool(said) == bool(expected)


def test_accumulation_steps_beside_a_global_batch_are_refused_before_the_ranks_start(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--global-batch=256", "--gradient-accumulation-steps=3"]
    assert "--global-batch 256 needs 8 at" in refusal("launch_distributed.sh", "16", *flags)
    assert refusal("slurm_distributed.sh", "16", *flags) == ""  # sbatch may be given more nodes
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert "--global-batch 256 needs 2 at" in refusal("slurm_distributed.sh", "16", *flags)


def test_fewer_machines_that_can_share_the_batch_are_enough(refusal: Callable[..., str]) -> None:
    assert "does not divide" in refusal("launch_multi_node.sh", "16", "--global-batch=64")
    assert refusal("launch_multi_node.sh", "16", "--global-batch=64", "--min-nodes=1") == ""


def test_a_run_that_goes_on_is_left_to_its_ranks(refusal: Callable[..., str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "runs/old/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last").write_text("step-00001-0000000")
    (tmp_path / "runs/old/metrics.jsonl").write_text("{}\n")
    flags = ["--global-batch=100", "--run-name=old"]
    assert refusal("launch_distributed.sh", "16", *flags, "--resume=auto") == ""
    assert "already contains a run" in refusal("launch_distributed.sh", "16", *flags)


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize("words", [["--help"], ["mobilenet", "-h"]])
def test_help_explains(script: str, words: list[str]) -> None:
    result = launch(script, words)
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("<model> <strategy>", "<batch_size> <epochs>", "DRY_RUN", "Examples"))
    assert result.stderr == ""


@pytest.mark.parametrize("script", WORDS)
def test_a_word_has_the_bounds_of_the_flag(script: str) -> None:
    for place, name in enumerate(LAUNCHERS[script].positional.split()[2:], start=2):
        largest = FIELDS[name].metadata["high"] if name in FIELDS else 1024  # as of plan.py and doctor.py
        for number in (1, largest, 0, largest + 1, "-1", "1.5", "abc", "", "1e3", "0x2", "9" * 30):
            words = [*WORDS[script][:place], str(number), *WORDS[script][place + 1 :]]
            said = f"^{FLAG_OF.get(name, name)} .* whole number from 1 to {largest}"
            with nullcontext() if number in (1, largest) else pytest.raises(UserError, match=said):
                check_training(read_arguments(script, words, {}).training)


@pytest.mark.parametrize(
    "flag", ["--epochs=3", "--epochs=03", "--batch-size=16", "--strategy=ddp", "--model-type=mobilenet"]
)
@pytest.mark.parametrize("form", ["=", " "])
def test_a_flag_may_repeat_a_word_and_not_contradict_it(flag: str, form: str) -> None:
    script, words = "launch_distributed.sh", ["mobilenet", "ddp", "2", "16", "3"]
    flags = flag.split("=") if form == " " else [flag]
    assert read_arguments(script, [*words, *flags], {}).flags == flags
    flags = [*flags[:-1], f"{flags[-1]}1"]
    name = flag.split("=")[0]
    with pytest.raises(UserError, match=f"^{name} is .*, but the .* argument is .*: leave {name} out\\.$"):
        read_arguments(script, [*words, "--seed", "7", *flags], {})


def test_a_varied_flag_that_is_a_word_changes_the_word() -> None:
    words = ["mobilenet", "ddp", "2", "16", "3", "--seed", "7"]
    found = with_flags("launch_distributed.sh", words, ["--batch-size=8", "--dropout=0.5", "--epochs=2", "--ema=0.9"])
    assert found == ["mobilenet", "ddp", "2", "8", "2", "--seed", "7", "--dropout=0.5", "--ema=0.9"]
    read_arguments("launch_distributed.sh", found, {})


@pytest.mark.parametrize("script", WORDS)
def test_nothing_in_any_word_is_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostfile.txt").write_text(HOSTFILE)
    canary = tmp_path / "ran"
    touch = f"touch {canary}"
    tab = touch.replace(" ", "${IFS}")
    payloads = [
        f"$({touch})",
        f"`{touch}`",
        f"; {touch}",
        f"a;{tab}",
        f"a[$({tab})]",
        f"x\n{touch}",
        f"--launcher_args={tab}",
        "-oProxyCommand=x",
        "a b",
    ]
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.chdir(tmp_path)
    for place in range(len(WORDS[script])):
        for payload in payloads:
            words = list(WORDS[script])
            words[place] = payload
            with pytest.raises(UserError):
                MAINS[script]([script, *words])
    for payload in payloads:
        monkeypatch.setenv("MASTER_PORT", payload)
        with pytest.raises(UserError):
            MAINS[script]([script, *WORDS[script]])
    # bash hands over all words alike, and looks at no variable
    assert_refused(launch(script, payloads, cwd=tmp_path, MASTER_PORT=payloads[0]))
    assert_refused(launch(script, [*WORDS[script], *payloads], cwd=tmp_path))
    assert not canary.exists()


def test_more_gpus_than_present_names_both_numbers(tmp_path: Path) -> None:
    words = ["mobilenet", "ddp", "8", "16", "3"]
    path = pretend_gpus(tmp_path, 4)
    for visible, count in ({}, 4), ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2):
        refused = launch("launch_distributed.sh", words, PATH=path, DRY_RUN="0", **visible)
        assert_refused(refused, "8 GPUs per node requested", f"has {count} GPUs")


def test_cpu_ranks_are_limited_by_cores() -> None:
    too_many = str(CORES * 8 + 1)
    result = launch("launch_distributed.sh", ["mobilenet", "ddp", too_many, "16", "3"], DRY_RUN="0")
    assert_refused(result, too_many, f"at most {CORES * 8}")


def test_an_occupied_port_is_refused_at_once() -> None:
    script = "launch_distributed.sh"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = launch(script, WORDS[script], DRY_RUN="0", MASTER_PORT=str(port))
    assert_refused(result, str(port))
    for flags, variables in (
        ([], {"MASTER_PORT": str(port)}),
        (["--master_port", str(port)], {}),
        ([f"--master-port={port}"], {}),
    ):
        assert read_arguments(script, [*WORDS[script], *flags], variables).master_port == port


def test_without_an_environment_the_line_says_make_setup(tmp_path: Path) -> None:
    root = stub_repo(tmp_path)
    (root / ".venv").unlink()
    script = root / "scripts" / "launch_distributed.sh"
    bare = {"PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        ["bash", str(script), *WORDS["launch_distributed.sh"]], env=bare, capture_output=True, text=True
    )
    assert_refused(result, "make setup")
