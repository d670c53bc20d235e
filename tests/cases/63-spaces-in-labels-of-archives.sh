#!/usr/bin/env bash
# turicreate#1531: labels of Parquet and JSON with a blank at the end, paths of a table with one before
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' || { [ $? = 77 ] && exit 0; bad "the input could not be made"; }
from lib import *
labels = [("cat", "cat ", "dog")[i % 3] for i in range(18)]
tar("t/data.tar", [m for i, l in enumerate(labels) for m in ((f"{i:02}.png", pic(i)), (f"{i:02}.json", json.dumps({"label": l})))])
parquet("q/data.parquet", [pic(i) for i in range(18)], labels)
with open("t.csv", "w") as f:
    f.write("label, path\n")
    for i in range(16): put(f"p/{i}.png", pic(i)); f.write(f"{'ab'[i % 2]}, p/{i}.png\n")
E
doc "doctor --check-data t" "doctor --check-data q" "doctor --check-data t.csv"
for i in 1 2; do one_line $i || [ "$(count $i)" = 2 ] || says $i 'note.*(space|blank|alike|same|differ)' || { rc=$(cat rc.$i); bad "cat and 'cat ' are 2 classes without a word: $(sed -n "${i}p" list)"; }; done
[ "$(cat rc.3)" = 0 ] || says 3 'space|blank' || { rc=$(cat rc.3); bad "a blank after the comma, as 'label, path' has: all images are missing: $(tail -1 list)"; }
ok "stripped or told"
