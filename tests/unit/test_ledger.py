"""The ledger's error bars."""

from __future__ import annotations

import dataclasses

from planning.ledger import (
    KINDS,
    LEDGER,
    MEMORY,
    STEP,
    LedgerEntry,
    cpu_machine,
    error_bar,
    machine_name,
    read_ledger,
    replace_entries,
)

ENTRY = LedgerEntry(
    *(STEP, "cpu", "mobilenet", "native", "ddp", 2, 16, 64, 10, "fp32", 1.0, 1.0),
    *(1e11, 2e10, "2 cores of a machine", "torch", "2026-11-22"),
)


def entries(errors, **changes):
    return [dataclasses.replace(ENTRY, predicted=1 + error, model=f"m{error}", **changes) for error in errors]


def test_an_error_bar_is_of_runs_alike_and_names_the_worst():
    ledger = entries([0.01, -0.02, 0.03, 0.04, -0.25]) + entries([0.5], ranks=4) + entries([0.9], engine="torch")
    ledger += entries([0.07], strategy="fsdp_stage3") + entries([0.11], kind=MEMORY)
    said = error_bar(ledger, STEP, "cpu", "native", "ddp", 2)
    assert "step time within 4% on 4 of 5 runs like this; the worst, m-0.25 under ddp on 2 rank(s)" in said
    assert said.endswith("-25%")
    assert "50%" in error_bar(ledger, STEP, "cpu", "native", "ddp", 4)
    assert "7%" in error_bar(ledger, STEP, "cpu", "native", "fsdp_stage3", 2)
    assert "memory within 11%" in error_bar(ledger, MEMORY, "cpu", "native", "ddp", 2)
    assert "of another engine" in error_bar(ledger, STEP, "cpu", "deepspeed", "ddp", 2)
    assert "no memory on h100-80gb has been measured" in error_bar(ledger, MEMORY, "h100-80gb", "native", "ddp", 2)


def test_a_new_measurement_replaces_that_of_the_same_run(tmp_path):
    path = tmp_path / "ledger.jsonl"
    replace_entries(entries([0.1, 0.2]), path)
    replace_entries([dataclasses.replace(entries([0.2])[0], measured=2.0)], path)
    assert [entry.measured for entry in read_ledger(path)] == [1.0, 2.0]
    assert read_ledger(tmp_path / "none") == []


def test_a_known_processor_is_not_measured_again():
    known = dataclasses.replace(ENTRY, machine=machine_name(), product_share=0.5)
    gpu = cpu_machine(4, [known]).gpu
    assert (gpu.peaks["fp32"], gpu.bandwidth_bytes_per_s, gpu.product_share) == (5e10, 1e10, 0.5)


def test_the_ledger_in_the_repository():
    """Within 15 % is the goal; the entries are measurements, so the test is about the file, not about speed."""
    ledger = read_ledger()
    assert {entry.ranks for entry in ledger if entry.device == "cpu"} == {1, 2, 4}
    assert {entry.kind for entry in ledger} == set(KINDS)
    assert all(entry.measured > 0 and entry.predicted > 0 for entry in ledger)
    assert LEDGER.read_text().count("\n") == len(ledger)
