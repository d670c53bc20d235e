"""Every preset trains: a short run on made-up images, small ones and in small batches."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import timm
import yaml
from safetensors.torch import save_file

from tests.kit import ROOT
from zerovision.training.base.settings import PRESETS

SMALL = [
    *("--data=fake", "--epochs=1", "--warmup-epochs=0", "--batch-size=50", "--image-size=32", "--report=false"),
    "--progressive-size=",
    "--learning-rate=0.001",  # the presets' rates are for batches of up to thousands
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_trains(name, tmp_path):
    command = [sys.executable, str(ROOT / "scripts/train_distributed.py"), "--preset", name, *SMALL]
    values = yaml.safe_load((ROOT / "zerovision" / "presets" / f"{name}.yaml").read_text())
    if values.get("pretrained"):  # the published ones are not here
        weights = tmp_path / "weights.safetensors"
        save_file(timm.create_model(values["model-type"].removeprefix("timm:"), num_classes=7).state_dict(), weights)
        command += ["--pretrained=false", f"--weights={weights}"]
    result = subprocess.run(
        [*command, "--log-dir", str(tmp_path), "--run-name", "short"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    entries = [json.loads(line) for line in (tmp_path / "runs/short/metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "val_loss")  # of steps; of an epoch, where a head is solved for without steps
    losses = [entry[key] for entry in entries for key in keys if key in entry]
    assert losses
    assert all(map(math.isfinite, losses))
