"""int8 against fp32: accuracy, size and time per image of every model of the zoo, trained on digits.

    python benchmarks/int8.py
    python benchmarks/int8.py --models mobilenet,cnn_lstm --log-dir /tmp/int8

Trains what --log-dir does not hold yet (about half an hour on 2 cores for all), then exports each with
scripts/export.py's own functions. A model that is refused is a row too.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Section, machine_name, save, show, versions
from zerovision.delivery.export import ExportRefused
from zerovision.delivery.export.export_job import ExportSettings
from zerovision.delivery.export.export_model import LATENCY_BATCHES, Exported, export_model

ROOT = Path(__file__).resolve().parents[1]
# Flags beside --model-type: enough for a decent accuracy in minutes on 2 cores, no more.
TRAINING = {
    "basic_cnn": ["--epochs=8", "--batch-size=32", "--learning-rate=0.004"],
    "mobilenet": ["--epochs=15", "--batch-size=32", "--learning-rate=0.004"],
    # Its own first run stands in for the hub's weights.
    "mobilenet_finetuned": [
        *("--epochs=6", "--head-epochs=2", "--batch-size=32", "--learning-rate=0.002"),
        "--weights={runs}/mobilenet/model.safetensors",
    ],
    "efficientnet": ["--epochs=10", "--batch-size=32", "--learning-rate=0.003"],
    "vgg": ["--epochs=5", "--batch-size=32", "--learning-rate=0.0003"],
    "cnn_lstm": ["--epochs=8", "--batch-size=32", "--learning-rate=0.004"],
    "ensemble": [
        *("--epochs=15", "--batch-size=32", "--learning-rate=0.002"),
        "--ensemble-members=mobilenet,efficientnet",
    ],
}


def train(model: str, log_dir: Path) -> Path:
    """Train a model unless it is there, and return its run's folder."""
    runs = log_dir / "runs"
    if not (runs / model / "model.safetensors").is_file():
        words = [word.format(runs=runs) for word in TRAINING[model]]
        command = [sys.executable, str(ROOT / "scripts" / "train_distributed.py"), f"--model-type={model}", *words]
        command += ["--strategy=ddp", f"--log-dir={log_dir}", f"--run-name={model}", "--progress=lines"]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)
    return runs / model


def row(model: str, exported: Exported) -> tuple[str, ...]:
    """Return one line of the table."""
    found, sizes = exported.agreement, exported.sizes
    figures = [f"{found.model_top1:.2%}", f"{found.file_top1:.2%}", f"{found.points_lost:+.2f}"]
    figures += [*(f"{sizes[name] / 1e6:.2f}" for name in ("fp32", "int8")), f"{sizes['int8'] / sizes['fp32']:.3f}"]
    for batch in LATENCY_BATCHES:
        before, after = (exported.latencies[name, batch] for name in ("fp32", "int8"))
        figures += [f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}"]
    return (model, *figures, "")


def main() -> None:
    """Train, export, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TRAINING), help="comma-separated")
    parser.add_argument(
        "--log-dir", type=Path, default=ROOT / "logs" / "int8", help="where runs are kept and looked for"
    )
    parser.add_argument("--threads", type=int, default=1, help="of onnxruntime")
    given = parser.parse_args()
    rows = []
    for model in given.models.split(","):
        run = train(model, given.log_dir.resolve())
        settings = ExportSettings(model=str(run), format="onnx", precision="int8", threads=given.threads)
        try:
            rows.append(row(model, export_model(settings)))
        except ExportRefused as refusal:
            rows.append((model, *[""] * 12, str(refusal)))
        print(*rows[-1], flush=True)
    times = tuple(
        f"{what}, batch {batch}" for batch in LATENCY_BATCHES for what in ("ms fp32", "ms int8", "fp32 / int8")
    )
    columns = ("model", "top-1 fp32", "top-1 int8", "points lost", "MB fp32", "MB int8", "share", *times)
    text = (
        f"digits, 360 validation images of 32 pixels, each 0.28 points of top-1; 256 training images to calibrate. "
        f"Milliseconds per image, onnxruntime with {given.threads} thread(s) on {machine_name()}, "
        f"medians. MB are 10^6 bytes of the ONNX file."
    )
    section = Section("int8 against fp32", text, (*columns, "refused"), rows)
    trained = "\n".join(f"- {model}: `{shlex.join(TRAINING[model])}`" for model in given.models.split(","))
    show(section)
    facts = f"{versions('torch', 'onnx', 'onnxruntime', 'onnxscript')}\n\nTrained on one rank with\n\n{trained}"
    save("int8", "int8 against fp32", facts, shlex.join(["python", *sys.argv]), [section])


if __name__ == "__main__":
    main()
