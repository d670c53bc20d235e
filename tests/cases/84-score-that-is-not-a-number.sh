#!/usr/bin/env bash
# tensorflow#41081, torchmetrics#205: no validation image has a label, so mAP is NaN: the first epoch is not the best for ever; right: refused before training, or NaN counts as worst and is told
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
with open("t.csv", "w") as f:
    f.write("path,label,split\n")
    for i in range(24): put(f"p/{i}.png", pic(i)); f.write(f"p/{i}.png,{'abc'[i % 3] if i < 18 else ''},{'train' if i < 18 else 'val'}\n")
E
doc "train --data t.csv --task multilabel --epochs 3 --run-name r"
one_line 1 && ok "refused: $(tail -1 list)"; rc=$(cat rc.1); says 1 '(mAP|map) nan' && ! says 1 'note.*(nan|undefined|not defined|no label)' && bad "$(grep -i 'nan' out.1): kept is epoch 1 of 3"
ok "$(grep 'best epoch' out.1)"
