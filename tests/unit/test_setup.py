"""What is installed: `make setup` and `make help` on a copy of the files, and the wheel of `pip install .`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.wheel import BUILD, OF_PACKAGE, build_wheel, tracked
from zerovision.training.base import run_folder
from zerovision.training.base.errors import UserError
from zerovision.training.config.command_line import parse_args
from zerovision.training.engines.settings import check_files

REPO_ROOT = Path(__file__).resolve().parents[2]
SAYS_IT_WORKS = "setup: installing"


# Makes environments at once, and notes which certificates it got; the real one is fetched where there is none.
STAND_IN_UV = f"""#!/bin/bash
case "$1 $2" in
"venv "*) {sys.executable} -m venv --without-pip .venv ;;
"pip install")
    env | sed -n "/^SSL_CERT/p" >"${{SEEN:-/dev/null}}"
    ! grep -q no-such-package requirements.txt
    ;;
esac
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The Makefile and the set-up script in an otherwise empty folder, and a stand-in for uv."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "uv").write_text(STAND_IN_UV)
    (tmp_path / "tools" / "uv").chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO_ROOT / "Makefile", tmp_path)
    shutil.copy(REPO_ROOT / "scripts" / "setup_env.sh", tmp_path / "scripts")
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\n")
    return tmp_path


def start(repo: Path, *words: str) -> subprocess.Popen:
    path = f"{repo / 'tools'}:{os.environ['PATH']}"
    env = os.environ | {"PYTHON": sys.executable, "MAKEFLAGS": "", "PATH": path}
    command = ["make", "--no-print-directory", "-C", str(repo), *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def make(repo: Path, *words: str) -> tuple[int, str]:
    """Run make and return its exit code and what it said on stderr."""
    process = start(repo, *words)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_a_second_call_does_nothing(repo: Path) -> None:
    (repo / "tools" / "uv").unlink()
    code, said = make(repo, "setup")
    assert code == 0, said
    assert SAYS_IT_WORKS in said
    assert subprocess.run([repo / ".venv/bin/python", "-c", ""]).returncode == 0
    assert make(repo, "setup") == (0, "")


def test_calls_at_the_same_time_wait_in_line(repo: Path) -> None:
    calls = [start(repo, "setup") for _ in range(3)]
    said = [call.communicate(timeout=60)[1] for call in calls]
    assert [call.returncode for call in calls] == [0, 0, 0], said
    assert sum(SAYS_IT_WORKS in text for text in said) == 1


def test_an_interrupted_environment_and_one_with_a_broken_interpreter_are_made_anew(repo: Path) -> None:
    make(repo, "setup")
    (repo / ".venv" / ".unfinished").touch()
    half_installed = repo / ".venv" / "lib" / "half_installed.py"
    half_installed.touch()
    assert make(repo, "setup")[0] == 0
    assert not half_installed.exists()
    assert make(repo, "setup") == (0, "")
    (repo / ".venv/bin/python").unlink()
    assert make(repo, "setup")[0] == 0
    assert (repo / ".venv/bin/python").exists()


@pytest.mark.slow  # pip makes two environments
def test_a_failed_install_is_an_error_and_is_made_good_later(repo: Path) -> None:
    (repo / "requirements.txt").write_text("./no-such-package\n")
    code, said = make(repo, "setup")
    assert code != 0
    assert "uv failed, trying pip" in said
    assert "could not be installed" in said
    assert make(repo, "setup")[0] != 0
    (repo / "requirements.txt").write_text("# nothing\n")
    assert make(repo, "setup")[0] == 0


def python(repo: Path, name: str, version: str) -> str:
    """Make a stand-in for a Python of another version; return its path."""
    major, minor = version.split(".")
    (repo / "tools" / name).write_text(f"#!/bin/bash\necho {version}\nexit $(( {major} < 3 || {minor} < 11 ))\n")
    (repo / "tools" / name).chmod(0o755)
    return str(repo / "tools" / name)


def test_a_chosen_python_is_looked_at_also_if_the_environment_is_there(repo: Path) -> None:
    make(repo, "setup")
    for target in ("setup", "setup-dev", "train"):
        code, said = make(repo, target, f"PYTHON={python(repo, 'python3.9', '3.9')}")
        assert code != 0
        assert "python3.9' is not Python 3.11 or later: name one" in said
    code, said = make(repo, "setup", f"PYTHON={python(repo, 'python3.99', '3.99')}")
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert code != 0
    assert f".venv has Python {own}, and '{repo}/tools/python3.99' is 3.99: remove it with 'make clean' first" in said
    assert make(repo, "setup", f"PYTHON={sys.executable}") == (0, "")
    python(repo, "python3", "3.9")  # the default, which nobody has chosen: the environment is newer
    assert make(repo, "setup", "PYTHON=python3") == (0, "")


def test_changed_requirements_are_installed_and_the_training_needs_nothing_more_after_the_tools(repo: Path) -> None:
    assert SAYS_IT_WORKS in make(repo, "setup-dev")[1]
    assert make(repo, "setup") == make(repo, "setup-dev") == (0, "")
    (repo / "requirements.txt").write_text("# changed\n")
    assert SAYS_IT_WORKS in make(repo, "setup")[1]
    assert SAYS_IT_WORKS in make(repo, "setup-dev")[1]
    assert make(repo, "setup") == make(repo, "setup-dev") == (0, "")


def test_a_python_that_does_not_exist_gets_one_line(repo: Path) -> None:
    code, said = make(repo, "setup", "PYTHON=no-such-python")
    assert code != 0
    assert "'no-such-python' is not Python 3.11 or later" in said
    assert not (repo / ".venv").exists()


@pytest.mark.parametrize("system", [["bundle.crt"], ["certs"], ["bundle.crt", "certs"], []])
def test_uv_gets_the_certificates_of_the_system(repo: Path, system: list[str]) -> None:
    """A Python whose system holds a network's own certificates in a file, in a folder, in both, or holds none."""
    bundle, folder, seen, tools = (repo / name for name in ("bundle.crt", "certs", "seen", "tools"))
    bundle.write_text("a certificate" if "bundle.crt" in system else "")
    folder.mkdir()
    if "certs" in system:
        (folder / "0a1b2c3d.0").write_text("a certificate")
    # Python looks at these variables; the set-up has none.
    (tools / "python").write_text(f'#!/bin/bash\nSSL_CERT_FILE={bundle} SSL_CERT_DIR={folder} {sys.executable} "$@"\n')
    (tools / "python").chmod(0o755)
    names = {"bundle.crt": f"SSL_CERT_FILE={bundle}", "certs": f"SSL_CERT_DIR={folder}"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}
    command = ["bash", "scripts/setup_env.sh", "requirements.txt"]
    env |= {"PATH": f"{tools}:{env['PATH']}", "PYTHON": str(tools / "python"), "SEEN": str(seen)}
    done = subprocess.run(command, cwd=repo, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(seen.read_text().splitlines()) == sorted(names[name] for name in system)


def test_help_lists_every_target(repo: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (repo / "Makefile").read_text(), re.MULTILINE)
    assert targets
    printed = subprocess.run(["make", "-C", repo, "help"], capture_output=True, text=True, check=True).stdout
    listed = [line.split()[0] for line in printed.splitlines() if not line.startswith("make")]
    assert sorted(listed) == sorted(targets[1].split())


def test_clean_keeps_the_logs(repo: Path) -> None:
    (repo / ".venv").mkdir()
    (repo / "logs" / "__pycache__").mkdir(parents=True)
    (repo / "scripts" / "__pycache__").mkdir()
    assert make(repo, "clean")[0] == 0
    assert not (repo / ".venv").exists()
    assert not (repo / "scripts" / "__pycache__").exists()
    assert (repo / "logs" / "__pycache__").exists()


COMMANDS = ("plan", "evaluate")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("copy"))  # setuptools leaves a folder there


@pytest.fixture
def wheel_of_sdist(wheel, tmp_path) -> Path:
    """A wheel that is built from what an index has: the tar file that is built of the same folder."""
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=wheel.parents[1], check=True, capture_output=True)
    (archive,) = wheel.parent.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.parametrize("way", ["wheel", "wheel_of_sdist"])
def test_the_wheel_has_the_files_of_git(way, request):
    built = request.getfixturevalue(way)
    inside = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    expected = {name if name.startswith("zerovision/") else f"zerovision/{name}" for name in tracked(*OF_PACKAGE)}
    assert inside == expected | {"zerovision/requirements.txt"}


def test_an_installed_copy_finds_what_belongs_to_it(wheel, tmp_path):
    packages, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(packages)
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(packages)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)

    assert "zerovision = zerovision.cli:main" in next(packages.glob("*.dist-info/entry_points.txt")).read_text()
    for command in COMMANDS:
        result = run("-m", "zerovision.cli", command, "--help")
        assert result.returncode == 0, result.stderr
        assert f"\nzerovision {command} " in result.stdout
        assert "scripts/" not in result.stdout
    words = ["--preset", "digits", "--data", "digits", "--image-size", "8", "--tensorboard", "false"]
    result = run("-m", "zerovision.cli", "launch", *["basic_cnn", "ddp", "1", "16", "1"], *words, "--run-name", "there")
    assert result.returncode == 0, result.stderr
    assert (elsewhere / "logs" / "runs" / "there" / "model.safetensors").is_file()
    assert "\nzerovision launch basic_cnn ddp 1 16 1" in (elsewhere / "logs/runs/there/README.md").read_text()
    result = run("-m", "zerovision.cli", "evaluate", "nowhere")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("module", "flags"),
    [("rich", ""), ("jinja2", ""), ("scipy", ""), ("tensorboard", ""), ("deepspeed", "--engine deepspeed")],
)
def test_a_missing_library_is_told_before_the_start(module, flags, monkeypatch):
    config, _ = parse_args(flags.split())
    check_files(config)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"has no module '{module}': run 'make setup'"):
        check_files(config)
    monkeypatch.setattr(run_folder, "CHECKOUT", None)
    with pytest.raises(UserError, match=rf"pip install '(zerovision\[)?{module}\]?'"):
        check_files(config)
    if module in ("tensorboard", "deepspeed"):
        check_files(replace(config, tensorboard=False, engine="auto"))


def test_every_extra_of_a_message_is_one_of_the_package():
    extras = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert run_folder.EXTRAS.keys() <= extras.keys()
    assert {"trackers", "dev", "all"} <= extras.keys()
    names = re.split(",", re.fullmatch(r"zerovision\[(.*)\]", extras["all"][0])[1])
    assert {*names} == run_folder.EXTRAS.keys()


@pytest.mark.slow  # some minutes, and an index of packages
@pytest.mark.timeout(1800)
def test_a_wheel_installs_into_an_empty_environment_and_trains(wheel, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    installed = subprocess.run([python, "-m", "pip", "install", "-q", wheel], capture_output=True, text=True)
    if "No matching distribution" in installed.stderr or "Connection" in installed.stderr:
        pytest.skip(f"no index: {installed.stderr[-200:]}")
    assert installed.returncode == 0, installed.stderr
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    trained = run(
        "zerovision",
        "launch",
        *["basic_cnn", "ddp", "2", "16", "1", "--data", "digits", "--image-size", "8", "--run-name", "r"],
    )
    assert trained.returncode == 0, trained.stderr
    assert {"README.md", "report.html", "model.safetensors"} <= {
        path.name for path in (tmp_path / "logs/runs/r").iterdir()
    }
    assert run("zerovision", "evaluate", "r").returncode == 0
    refused = run("zerovision", "export", "r", "--format", "onnx")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "pip install 'zerovision[export]'" in refused.stderr
    api = run("python", "-c", "import zerovision; print(zerovision.train('digits', image_size=8, epochs=1).folder)")
    assert api.stdout.splitlines()[-1] == str(tmp_path / "logs" / "runs" / "digits"), api.stderr
