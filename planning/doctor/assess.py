"""The rows of the doctor's table, in its order: what the findings mean."""

from __future__ import annotations

import dataclasses

from planning.doctor import hosts, machine
from planning.doctor.collect import Findings, Request
from planning.doctor.data import judge_data
from planning.doctor.links import judge_network, judge_step
from planning.doctor.machine import Need
from planning.doctor.paths import judge_paths
from planning.doctor.table import Row, join_hosts, some_of
from training.config import REPO_ROOT
from training.parallel.strategies import STRATEGIES


def judge(request: Request, found: Findings) -> list[Row]:
    """Return all rows; what several hosts have in common is one row."""
    rows = _judge_reach(request, found)
    if not request.is_alone:
        rows += _judge_sameness(found)
    rows += _judge_machines(request, found)
    rows += _judge_data_and_model(request, found)
    rows += _judge_network(request, found)
    if request.is_alone:
        rows = [dataclasses.replace(row, host="") for row in rows]
    return join_hosts(rows)


def _judge_reach(request: Request, found: Findings) -> list[Row]:
    rows = [Row("hosts", "wrong", str(error), error.cure, host) for host, error in found.lost.items()]
    rows += hosts.judge_identity(found.facts)
    return rows or ([] if request.is_alone else [Row("hosts", "ok", f"{some_of(list(request.slots))} answer")])


def _judge_sameness(found: Findings) -> list[Row]:
    """Judge what must be the same on all machines."""
    rows = hosts.judge_names(found.facts)
    if found.here:
        rows += hosts.judge_versions(found.facts, found.here)
        rows += hosts.judge_code(found.facts, found.here)
    if found.fingerprints:
        rows += hosts.judge_fingerprints(found.fingerprints)
    rows += hosts.judge_log_sharing(found.writes_logs, found.sees_logs)
    return rows + hosts.judge_clocks(found.clocks)


def _judge_machines(request: Request, found: Findings) -> list[Row]:
    """Judge each machine for itself; the same check of all hosts side by side."""
    pins = machine.read_pins((REPO_ROOT / "requirements.txt").read_text())
    needs = {
        host: Need(
            ranks=request.slots[host],
            all_ranks=sum(request.slots.values()),
            parameters=found.model.get("parameters"),
            keep_last=request.config.keep_last,
            cluster_has_gpus=any(facts["gpus"] for facts in found.facts.values()),
        )
        for host in found.facts
    }
    rows = []
    if found.here and not request.is_alone:
        rows.append(machine.judge_packages(found.here, Need(), pins))
    for host, facts in found.facts.items():
        packages = machine.judge_packages(facts, needs[host], pins)
        # That all hosts have the same as this machine has been said already.
        if request.is_alone or packages.verdict == "wrong":
            rows.append(dataclasses.replace(packages, host=host))
    for check in machine.CHECKS:
        for host, facts in found.facts.items():
            if row := check(facts, needs[host]):
                rows.append(dataclasses.replace(row, host=host))
    everyone = [facts for facts in (found.here, *found.facts.values()) if facts]
    rows.append(machine.judge_locks(facts["locks"] for facts in everyone))
    return rows + hosts.judge_port(found.facts, request.port)


def _judge_data_and_model(request: Request, found: Findings) -> list[Row]:
    rows = []
    if found.data:
        host = found.data["host"]
        rows += judge_data(request.config.data, host, found.data, found.model, request.slots[host])
    if "problem" in found.model:
        rows.append(Row("model", "wrong", found.model["problem"], "correct --model-type"))
    return rows


def _judge_network(request: Request, found: Findings) -> list[Row]:
    if not found.network:
        return []
    rows = judge_paths(found.failed_paths) or judge_network(found.network, found.interfaces)
    reports = [answer["report"] for answer in found.network.values() if "report" in answer]
    # CPU ranks of one machine share memory and send nothing (training.parallel.flat_buffers).
    sends = len(request.slots) > 1 or any(report["backend"] == "nccl" for report in reports)
    if reports and "parameters" in found.model and sends:
        config = request.config
        stage = STRATEGIES[config.strategy].zero_stage
        name = f"{config.model_type}, {config.strategy}"
        rows.append(judge_step(reports[0], name, found.model["parameters"], stage))
    return rows
