"""The report of `run.py`: tables made of the lines that its parts have left, however far they came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.contestants import PLAIN, TIMM, TIMM_COMPILED
from benchmarks.gpu.lines import LINES, read_lines
from benchmarks.report import Section, save, spread

Line = Mapping[str, Any]


def write_report(folder: Path, command: str) -> Path:
    """Write the lines of a folder as tables; return the file."""
    lines = read_lines(folder / LINES)
    facts = next(
        (f"{line['hardware']}, {line['date']}; {line['versions']}." for line in lines if line["kind"] == "facts"), ""
    )
    return save("gpu", "One GPU in one call", facts, command, [section for section in _sections(lines) if section.rows])


def _sections(lines: list[Line]) -> Iterable[Section]:
    def of(kind: str) -> list[Line]:
        return [line for line in lines if line["kind"] == kind]

    rates = [
        (name.replace("_", " "), f"{value:.1f}")
        for line in of("rates")
        for name, value in line.items()
        if name != "kind"
    ]
    yield Section("What the card reaches", "Copies count bytes read and written.", ("rate", "measured"), rates)
    rows = [
        (line["model"], *(f"{line[name]:.4f}" for name in ("logits_error", "gradient_cosine", "gradient_ratio")))
        for line in of("family")
    ]
    columns = ("model", "logits, relative error", "gradient, cosine", "gradient, ratio of norms")
    yield Section(
        "bf16 on the device beside fp32 on the CPU", "64 pixels, 8 images, one step without dropout.", columns, rows
    )
    rows = [
        (line["model"], line["trial"], str(line["killed_after_step"]), str(line["codes"]), str(line["equal_bytes"]))
        for line in of("resume")
    ]
    columns = ("model", "trial", "killed after step", "exit codes", "bytes equal those of the undisturbed run")
    yield Section("Killed and resumed", "Digits, --deterministic true.", columns, rows)
    others = (TIMM, TIMM_COMPILED, PLAIN)
    columns = ("contestant", "images/s", *(f"/ {other}" for other in others), "memory, GB", "MFU", "share of roofline")
    text = "bf16; ratios of images/s within each round, median (quartiles): more is faster. Memory: allocator's."
    for model, batch_size, pixels in dict.fromkeys(
        (one["model"], one["batch_size"], one["pixels"]) for one in of("steps")
    ):
        found = [one for one in of("steps") if (one["model"], one["batch_size"]) == (model, batch_size)]
        rows = [_row(one, others) for one in found]
        yield Section(f"{model}, {batch_size} images of {pixels} pixels", text, columns, rows)
    rows = [
        (
            *(
                line["model"],
                str(line["workers"]),
                line["cache"],
                " and ".join(f"{rate:.0f}" for rate in line["images_per_s"]),
            ),
            *(f"{line['data_wait_share']:.0%}", f"{line['evaluation_seconds']:.1f}"),
            f"{max(line['save_stall_seconds'], default=0):.2f}",
            f"{line['memory_bytes'] / 1e9:.2f}",
        )
        for line in of("training")
    ]
    columns = (
        "model",
        "workers",
        "--cache",
        "images/s of each epoch",
        "waits for data",
        "evaluation, s",
        "longest stall of a save, s",
        "memory, GB",
    )
    yield Section("Trainings from JPEG files", "Two epochs or three.", columns, rows)
    rows = [
        (line["kind"].replace("_", " "), line["what"], line.get("error", ""))
        for line in lines
        if line["kind"] in ("failed", "left_out")
    ]
    rows += [
        ("part ended early", line["part"], f"exit code {line['exit_code']} (None: at its {line['seconds']:.0f} s)")
        for line in of("part")
        if line["exit_code"] != 0
    ]
    rows += [("tests", f"exit code {line['exit_code']}", line["last_line"]) for line in of("tests")]
    yield Section(
        "Failed, left out, tested", "None of the tables has these.", ("what happened", "to what", "why"), rows
    )


def _row(line: Line, others: tuple[str, ...]) -> tuple[str, ...]:
    ratios = [spread(line["ratios"][other]) if other in line["ratios"] else "-" for other in others]
    shares = [f"{line[name]:.1%}" if line[name] else "-" for name in ("mfu", "share_of_roofline")]
    return (line["contestant"], f"{line['images_per_s']:.0f}", *ratios, f"{line['memory_bytes'] / 1e9:.2f}", *shares)
