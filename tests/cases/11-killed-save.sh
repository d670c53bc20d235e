#!/usr/bin/env bash
# safetensors#764, #792: an interrupted save leaves a temporary file (.tmpXXXXXX, safetensors 0.8's name) that nobody removes
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b
many "train --data d --run-name r"; [ "$(cat rc.1)" = 0 ] || bad "$(tail -1 out.1)"
c=$(ls -d logs/runs/r/checkpoints/step* | tail -1); mkdir -p logs/runs/r/export
# the real thing: a process of ours is killed while safetensors writes
"$PY" -c "
import torch,sys
from safetensors.torch import save_file
t={'a':torch.zeros(120_000_000)}; print('go',flush=True)
for i in range(99): save_file(t,'logs/runs/r/model.safetensors.x')" >go & k=$!
for i in $(seq 3000); do [ -n "$(find logs/runs/r -maxdepth 1 -name '.tmp*' -size +1M)" ] && break; kill -0 $k 2>/dev/null || break; sleep 0.01; done; kill -9 $k; wait $k 2>/dev/null; rm -f logs/runs/r/model.safetensors.x
t=$(find logs/runs/r -maxdepth 1 -name '.tmp*' | head -1); echo "killed save left: $t"; [ -n "$t" ] || t=logs/runs/r/.tmpAbC123
: >>"$t"; cp "$t" "$c/.tmpXyZ789"; cp "$t" logs/runs/r/export/.tmpQQQQQQ; find logs -name '.tmp*' -exec touch -d '3 days ago' {} +
many "train --data d --run-name r --epochs 2 --resume auto" "export logs/runs/r --format safetensors" "train --data d --run-name other"
left=$(find logs -name '.tmp*' -printf '%P(%s bytes) '); rc=0
[ -z "$left" ] && ok "nothing is left"; bad "left for ever after a resume, an export and another run: $left"
