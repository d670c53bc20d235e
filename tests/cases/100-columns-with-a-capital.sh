#!/usr/bin/env bash
# own (pandas, Excel): a header path,label,Split,Group,Weight: not passed over without a word, so that validation lines are trained on; right: known in any case, refused, or a note of the columns not used
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
with open("t.csv", "w") as f:
    f.write("path,label,Split\n")
    for i in range(24): put(f"p/{i}.png", pic(i)); f.write(f"p/{i}.png,{'ab'[i % 2]},{'val' if i >= 14 else 'train'}\n")
with open("g.csv", "w") as f: f.write("path,label,Group\n" + "".join(f"p/{i}.png,{'ab'[i % 2]},patient{i // 8}\n" for i in range(24)))
E
doc "doctor --check-data t.csv" "doctor --check-data g.csv"
one_line 1 || says 1 'Split' || says 1 'all *│ *14 *│ *10' || { rc=$(cat rc.1); bad "14 lines are train and 10 val, taken are: $(grep -a '│ *all' out.1 | tr -d '│'), no word of the column Split"; }
one_line 2 || says 2 'Group' || says 2 'all *│ *(8|16) *│' || { rc=$(cat rc.2); bad "3 patients of 8 images, divided: $(grep -a '│ *all' out.2 | tr -d '│'), no word of the column Group"; }
ok "$(tail -1 list)"
