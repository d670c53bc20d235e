"""Random words, flags, variables and hostfiles for the launchers; a shell would take most of them for more than words.

Every hostile word would make the file `CANARY` in the folder where the launcher runs, were it ever run.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st

from tests.unit.launching import HOSTFILE, SCRIPTS, USER_ERROR, WORDS, environment, words_of

CANARY = "canary-7f3a"
TOUCH = f"touch {CANARY}"
NO_SPACE = TOUCH.replace(" ", "${IFS}")
HOSTILE = [
    *[f"$({TOUCH})", f"`{TOUCH}`", f";{NO_SPACE}", f"; {TOUCH};", f"x|{TOUCH}", f"x&&{TOUCH}", f"&{TOUCH}&"],
    *[f"x\n{TOUCH}\n", f"'; {TOUCH}; '", f'"; {TOUCH}; "', f"a[$({TOUCH})]", f"a[$({NO_SPACE})]=1", f"<({TOUCH})"],
    *[f"${{x:=$({TOUCH})}}", f"-oProxyCommand={TOUCH}", f"-oProxyCommand={NO_SPACE}", f"\\$({TOUCH})", f"%n$({TOUCH})"],
    *[f"--launcher_args=-oProxyCommand={NO_SPACE}", f"@{CANARY}", f">{CANARY}", f"x>{CANARY}", f"--log-dir=$({TOUCH})"],
]
ODD = [
    *["", " ", "-", "--", "-1", "0", "08", "1e3", "0x10", "9" * 30, "٣", "é", "*", "~", "{1..9}", "\t", "\\", "'", '"'],
    *["!!", "\x1b[31m", "a,b", "-h"],
]
VARIABLES = {
    "launch_distributed.sh": [
        *["MASTER_PORT", "STOP_TIMEOUT", "MAX_RESTARTS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"],
        "TORCH_EXTENSIONS_DIR",
    ],
    "launch_multi_node.sh": [
        *["MASTER_PORT", "STOP_TIMEOUT", "MAX_RESTARTS", "HOSTFILE"],
    ],
    "slurm_distributed.sh": [
        *["MASTER_PORT", "STOP_TIMEOUT", "MAX_RESTARTS", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"],
        *["SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST"],
    ],
}
# What a launch starts, each of which fails for good so that the launch ends at once.
FAKE_PROGRAMS = {
    "ssh": "echo 'Permission denied' >&2; exit 255",
    "srun": "echo 'srun: error: Permission denied' >&2; exit 1",
    "scontrol": "echo node-1; echo node-2",
}
FLAGS = [
    "--seed",
    "--data",
    "--run-name",
    "--resume",
    "--master_port",
    "--master-port",
    "--max-restarts",
    "--min-nodes",
    "--hostfile",
]

hostile_text = st.sampled_from(HOSTILE) | st.builds(str.__add__, st.sampled_from(HOSTILE), st.sampled_from(HOSTILE))
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
value = hostile_text | st.sampled_from(ODD) | any_text
flag = st.builds(lambda name, text: [name, text], st.sampled_from(FLAGS), value)
joined_flag = st.builds(lambda name, text: [f"{name}={text}"], st.sampled_from(FLAGS), value)
taken_flag = st.builds(lambda text: ["--data", f"/data/{text}"], value)  # the training entry judges it much later
good_flags = st.sampled_from([["--seed", "7"], ["--run-name=a.b"], ["--learning-rate", "1e-3"]])
hostfile_line = st.one_of(
    st.builds("{} slots={}".format, value, st.integers(-1, 10**5) | value),
    st.builds("node{} slots=8".format, st.sampled_from([word for word in HOSTILE if not set(" \n") & set(word)])),
    value,
    st.sampled_from(HOSTFILE.splitlines()),
)
hostfile_text = st.just(HOSTFILE) | st.lists(hostfile_line, max_size=6).map("\n".join)

fuzz_settings = settings(
    derandomize=True,  # the same cases every time
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Case:
    """What a launcher is given."""

    words: list[str]
    variables: dict[str, str]
    hostfile: str


@st.composite
def cases(draw: st.DrawFn, script: str) -> Case:
    """One or two hostile or odd things among words, flags, variables and hostfile; all else is good."""
    words, variables, hostfile = list(WORDS[script]), {}, HOSTFILE
    places = ["taken flag", "word", "flag", "joined flag", "lone word", "variable"]
    if script == "launch_multi_node.sh":
        places.append("hostfile")
    flags = draw(st.lists(good_flags, max_size=1))
    for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2)):
        if place == "word":
            words[draw(st.integers(0, len(words) - 1))] = draw(value)
        elif place == "taken flag":
            flags.append(draw(taken_flag))
        elif place == "flag":
            flags.append(draw(flag))
        elif place == "joined flag":
            flags.append(draw(joined_flag))
        elif place == "lone word":
            flags.append([draw(value)])
        elif place == "variable":
            variables[draw(st.sampled_from(VARIABLES[script]))] = draw(value)
        else:
            hostfile = draw(hostfile_text)
    return Case(words + [word for words in flags for word in words], variables, hostfile)


def check_dry_run(script: str, case: Case) -> None:
    """The launcher refuses with one line, or prints one command whose words are those given; it runs none of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hostfile.txt").write_text(case.hostfile)
        result = subprocess.run(
            ["bash", str(SCRIPTS / script), *case.words],
            cwd=folder,
            env=environment(**({"DRY_RUN": "1", "SLURM_JOB_ID": "77"} | case.variables)),
            capture_output=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        check_refusal_or_success(result, case)
        if result.returncode == 0 and not {"-h", "--help"} & set(case.words):
            printed = result.stdout.decode()
            assert printed.count("\n") == 1, printed
            words = words_of(printed)
            given = [word for word in case.words if word.startswith("/data/")]
            assert set(given) <= set(words), (given, words)
            event("a hostile word came through whole", bool(given))
        assert sorted(path.name for path in folder.iterdir()) == ["hostfile.txt"], case


def check_with_fake_programs(script: str, case: Case) -> None:
    """The launcher starts programs that stand in for ssh, srun, ...: no word of the user's reaches them."""
    with tempfile.TemporaryDirectory() as name:
        folder, programs, record = Path(name) / "here", Path(name) / "bin", Path(name) / "record"
        folder.mkdir()
        programs.mkdir()
        record.touch()
        (folder / "hostfile.txt").write_text(case.hostfile)
        for program, text in FAKE_PROGRAMS.items():
            (programs / program).write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >>{record}\n{text}\n")
            (programs / program).chmod(0o755)
        given = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[1-2]"} | case.variables
        result = subprocess.run(
            ["bash", str(SCRIPTS / script), *case.words, f"--log-dir={name}/logs"],
            cwd=folder,
            env=environment(**(given | {"PATH": f"{programs}:{environment()['PATH']}"})),
            capture_output=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        said = result.stderr.decode(errors="replace")
        assert result.returncode in (0, USER_ERROR), (case, result.returncode, said)
        assert "Traceback" not in said, said
        started = record.read_text()
        event(f"a program was started: {bool(started)}")
        assert CANARY not in started, (case, started)
        assert sorted(path.name for path in folder.iterdir()) == ["hostfile.txt"], case


def check_refusal_or_success(result: subprocess.CompletedProcess[bytes], case: Case) -> None:
    """Exit code 0, or 2 with nothing printed but one line on stderr."""
    said = result.stderr.decode(errors="replace")
    event(f"exit code {result.returncode}")
    assert result.returncode in (0, USER_ERROR), (case, result.returncode, said)
    assert "Traceback" not in said, said
    if result.returncode == USER_ERROR:
        assert (result.stdout, said.count("\n")) == (b"", 1), (case, result.stdout, said)
