#!/usr/bin/env bash
# ImageNetV2#10, DIGITS#665: a published network of 1000 classes teaches data with 1000 classes named 0 to 999, which sort as text: its class 2 is not their class 10; right: refused, or told, when the names are no wnids or the labels' names differ
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mkdir -p hub; export HF_HOME=$W/hub HF_HUB_OFFLINE=1
"$PY" - <<'E'
from lib import *
import timm, safetensors.torch
m = timm.create_model("test_efficientnet.r160_in1k", pretrained=False); d = "hub/hub/models--" + m.pretrained_cfg["hf_hub_id"].replace("/", "--")
put(f"{d}/refs/main", "abc"); os.makedirs(f"{d}/snapshots/abc"); safetensors.torch.save_file(m.state_dict(), f"{d}/snapshots/abc/model.safetensors")
b = [pic(k, 32) for k in range(3)]
for c in range(1000): put(f"d/{c}.png", b[c % 3])
put("d.csv", "path,label,split\n" + "".join(f"d/{c}.png,{c},train\n" for c in range(1000)) + "".join(f"d/{c}.png,{c},val\n" for c in range(1, 4)))
E
train --data d.csv --teacher timm:test_efficientnet.r160_in1k --distill kl:1 --batch-size 500 --image-size 16 --run-name r; tb
grep -q 'could not be loaded' out && bad "the made-up cache was not taken: $(last)"; [ $rc = 2 ] && ok "refused: $(last)"
grep -Eqi '(note|warn).*(teacher|order|wnid)' out && ok "$(grep -Ei '(note|warn).*(teacher|order|wnid)' out | head -1)"
grep -q '^data d.csv: 1000 training' out || bad "$(last)"; bad "classes 0 to 999 are taught by ImageNet's 1000 classes, its number 2 for class 10, without a word"
