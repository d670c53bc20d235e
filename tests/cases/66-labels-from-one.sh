#!/usr/bin/env bash
# pytorch_geometric#441, tensorflow-models#1247: whole labels 1 to 3 in an npz file: class 0 has no image; right: a perfect network has a macro F1 of 1, or the labels are refused
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
import numpy as np
r = np.random.default_rng(0)
def some(n):
    y = np.arange(n) % 3; x = r.integers(0, 60, (n, 16, 16, 3)); x[np.arange(n), :, :, y] += 150; return x.astype("uint8"), y + 1
x, y = some(60); u, v = some(24); np.savez("one.npz", x_train=x, y_train=y, x_test=u, y_test=v)
E
doc "train --data npz:one.npz --image-size 16 --epochs 4 --learning-rate 0.01 --best-by macro_f1 --augmentation none --run-name r"
one_line 1 && ok "refused: $(tail -1 list)"; [ "$(cat rc.1)" = 0 ] || { rc=$(cat rc.1); bad "$(tail -1 list)"; }
"$PY" -c "
import json; s = json.load(open('logs/runs/r/evaluation/scores.json')); print(s['top1'], s['macro']['f1']); assert s['top1'] < 1 or s['macro']['f1'] > .99" >g || bad "top-1 and macro F1 of a network without a mistake: $(cat g), as class 0, of no image, counts as 0"
ok "$(cat g)"
