#!/usr/bin/env bash
# timm#1324, timm#1383: published weights made with bicubic resizing and another share of the crop: taken over, or the difference is told
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mkdir -p hub; export HF_HOME=$W/hub HF_HUB_OFFLINE=1
"$PY" - <<'E'
from lib import *
import timm, safetensors.torch
m = timm.create_model("test_vit.r160_in1k", pretrained=False); d = "hub/hub/models--" + m.pretrained_cfg["hf_hub_id"].replace("/", "--")
put(f"{d}/refs/main", "abc"); os.makedirs(f"{d}/snapshots/abc"); safetensors.torch.save_file(m.state_dict(), f"{d}/snapshots/abc/model.safetensors")
for k, c in enumerate("ab"):
    for i in range(6): put(f"d/{c}/{i}.png", pic(k))
E
train --data d --model-type timm:test_vit.r160_in1k --pretrained true --image-size 160 --run-name r; tb; [ $rc = 0 ] || [ $rc = 2 ] || bad "$(last)"
[ $rc = 2 ] && ! grep -qi 'bicubic\|interpolation' out && bad "$(last)"; grep -qi 'bicubic\|crop_pct\|eval-crop\|interpolation' out && ok "$(grep -i 'bicubic\|crop\|interpolation' out | head -1)"
"$PY" -c "
import json, struct; f = open('logs/runs/r/model.safetensors', 'rb'); t = f.read(struct.unpack('<Q', f.read(8))[0]).decode(); print('bicubic' in t)" | grep -q True && ok "bicubic was taken over"
bad "the weights say bicubic and 0.95, the run uses bilinear and 0.875 and says nothing"
