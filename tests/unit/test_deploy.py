"""The files of deploy/ against the schemas of who reads them, and their command lines against ours."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from copy import deepcopy
from typing import Any

import pytest
import yaml

from tests.kit import ROOT
from zerovision.launch.arguments import check_training, read_arguments

# Of the definitions of JobSet v1alpha2 and TrainJob v1alpha1 (August 2026), and of SkyPilot's: all names of each object
# that the files have, and the types of those that they use.
SCHEMAS = json.loads((ROOT / "tests" / "references" / "deploy_schemas.json").read_text())
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / f"{name}.yaml").read_text())


def problems(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    kinds = schema.get("type", [])
    allowed = tuple(KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
        return [f"{place}: {value!r} is no {kinds}"]
    found = [f"{place}: {value!r}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, list):
        return found + [one for item in value for one in problems(item, schema["items"], f"{place}[]")]
    if isinstance(value, dict):
        found += [f"{place}: no {name}" for name in schema.get("required", []) if name not in value]
        for name, part in value.items():
            if name in schema.get("properties", {}):
                found += problems(part, schema["properties"][name], f"{place}.{name}")
            elif "additionalProperties" in schema:
                found += problems(part, schema["additionalProperties"], f"{place}.{name}")
            elif schema.get("properties"):
                found.append(f"{place}: unknown {name}")
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_is_as_its_reader_takes_it(name):
    content = load(name)
    assert problems(content, SCHEMAS[name]) == []
    wrong = deepcopy(content)
    wrong.get("spec", wrong)["sepc"] = 1
    assert len(problems(wrong, SCHEMAS[name])) == 1


def bash_of(name: str) -> str:
    content = load(name)
    if name == "sky":
        return content["run"]
    if name == "trainjob":
        return content["spec"]["trainer"]["args"][0]
    pod = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod["containers"][0]["args"][0]


@pytest.mark.parametrize("name", SCHEMAS)
def test_their_command_lines_are_taken(name):
    command = bash_of(name)
    assert subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0
    words = shlex.split(command.replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8").replace("\\\n", " "))
    script = next(word for word in words if word.startswith("scripts/"))
    assert (ROOT / script).is_file()
    after = words[words.index(script) + 1 :]
    if name == "sky":
        after = read_arguments("launch_distributed.sh", after, {}).training
    config = check_training(after)
    assert (config.run_name, config.resume, config.data, config.log_dir) == ("first", "auto", "/data", "/logs")


def test_volumes_are_mounted_that_there_are():
    pods = [load("jobset")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
    patch = load("trainjob")["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    pods.append(patch["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])
    for pod in pods:
        mounts = pod["containers"][0]["volumeMounts"]
        assert {one["name"] for one in mounts} == {one["name"] for one in pod["volumes"]}
        assert {"/dev/shm", "/data", "/logs"} <= {one["mountPath"] for one in mounts}
    assert {*load("sky")["file_mounts"]} == {"/data", "/logs"}


def test_ranks_are_as_many_as_gpus():
    job = load("jobset")["spec"]["replicatedJobs"][0]["template"]["spec"]
    command, limits = bash_of("jobset"), job["template"]["spec"]["containers"][0]["resources"]["limits"]
    given = {name: int(value) for name, value in re.findall(r"--(nnodes|nproc_per_node)=(\d+)", command)}
    assert given == {"nnodes": job["parallelism"], "nproc_per_node": limits["nvidia.com/gpu"]}
    trainer = load("trainjob")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
