#!/usr/bin/env bash
# lightning-flash#728: a cell holds several labels with a space or a comma between: not one class for each combination; right: the single labels, or a refusal or note that names --label-column or the separator
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
names = ("scab", "rust", "mildew"); sets = [[a] for a in names] + [["scab", "rust"], ["rust", "mildew"], ["scab", "mildew"]]
rows = []
for i in range(24):
    put(f"p/{i}.png", pic(i)); rows.append((f"p/{i}.png", sets[i % 6]))
for file, mark in (("space.csv", " "), ("comma.csv", ", ")):
    with open(file, "w", newline="") as f: csv.writer(f).writerows([("path", "labels")] + [(p, mark.join(s)) for p, s in rows])
E
doc "doctor --check-data space.csv -- --task multilabel --label-column labels" "doctor --check-data comma.csv -- --task multilabel --label-column labels"
for i in 1 2; do one_line $i || [ "$(count $i)" = 3 ] || says $i 'note.*(separat|several|list|;)' || { rc=$(cat rc.$i); bad "3 labels, $(count $i) classes and no word: $(sed -n "${i}p" list)"; }; done
ok "$(count 1) and $(count 2) classes, or told"
