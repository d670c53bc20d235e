#!/usr/bin/env bash
# tensorflow#41081: --best-by auroc of multilabel data whose validation images have one of the classes: defined for that class (positives and negatives), so not refused as for single labels; and never NaN as the best
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
with open("t.csv", "w") as f:
    f.write("path,label,split\n")
    for i in range(30): put(f"p/{i}.png", pic(i)); f.write(f"p/{i}.png,{'abc'[i % 3] if i < 18 or i % 3 == 0 else ''},{'train' if i < 18 else 'val'}\n")
with open("u.csv", "w") as f:
    f.write("path,label,split\n")
    for i in range(24): f.write(f"p/{i}.png,{'abc'[i % 3] if i < 18 else 'a;b;c'},{'train' if i < 18 else 'val'}\n")
E
doc "train --data t.csv --task multilabel --best-by auroc --epochs 2 --run-name r" "train --data u.csv --task multilabel --best-by auroc --epochs 2 --run-name u"
rc=$(cat rc.1); [ "$rc" = 0 ] && ! says 1 'auroc nan' || bad "positives of one class: $(grep -v '^ *$' out.1 | tail -1)"
one_line 2 || ! says 2 'auroc nan' || { rc=$(cat rc.2); bad "every validation image has every label: $(grep -i nan out.2)"; }; ok "$(head -1 list)"
