#!/usr/bin/env bash
# timm#222, vision#714: classes 1 2 3 10: order here 1,10,2; timm natural 1,2,10. Right: a class map lies beside the weights, or the page says so
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
N=12 mk d 1 2 3 10 11 20
train --data d --run-name r; tb; [ $rc = 0 ] || bad "$(last)"
echo "$(ls -A logs/runs/r)"
"$PY" - <<'E'
import json,struct
f=open('logs/runs/r/model.safetensors','rb');h=json.loads(f.read(struct.unpack('<Q',f.read(8))[0]))['__metadata__'];print({k:v for k,v in h.items() if '"11"' in v or "'11'" in v or '11' in v})
E
if ls logs/runs/r | grep -qi 'class_map\|classes.txt\|labels'; then ok "$(ls logs/runs/r | grep -i class)"; fi
grep -rqi 'natural\|numeric\|class.map' "$P/docs/guides" "$P/docs/reference" && ok "the pages tell: $(grep -rhi 'natural\|class.map' "$P/docs/guides" "$P/docs/reference" | head -1)"
bad "no class map beside the weights and no word about timm's order in the guides"
