#!/usr/bin/env bash
# pytorch_geometric#441, sklearn's f1_score(average='macro'): a class that neither occurs nor is predicted has no part in macro F1: a table whose validation lines lack one class, evaluated
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
with open("t.csv", "w") as f:
    f.write("path,label,split\n")
    for k, c in enumerate("abc"):
        for i in range(14): put(f"p/{c}{i}.png", pic(k)); f.write(f"p/{c}{i}.png,{c},{'val' if i > 9 and c != 'c' else 'train'}\n")
E
doc "train --data t.csv --epochs 6 --learning-rate 0.01 --augmentation none --best-by macro_f1 --run-name r"
one_line 1 && ok "refused: $(tail -1 list)"; [ "$(cat rc.1)" = 0 ] || { rc=$(cat rc.1); bad "$(tail -1 list)"; }
"$PY" -c "
import json; s = json.load(open('logs/runs/r/evaluation/scores.json')); print(s['top1'], s['macro']['f1']); assert s['top1'] < 1 or s['macro']['f1'] > .99" >g || bad "top-1 and macro F1 without a mistake: $(cat g)"
ok "$(cat g)"
