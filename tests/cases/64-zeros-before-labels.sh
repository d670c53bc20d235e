#!/usr/bin/env bash
# fastai#1008, filesql#150: labels of digits that are text, such as 001, are the same classes from a folder, a table, a tar and Parquet files; right: 3 classes of these names everywhere
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' || { [ $? = 77 ] && exit 0; bad "the input could not be made"; }
from lib import *
names = ("001", "002", "010"); rows = [(f"{k}{i}.png", pic(k), l) for k, l in enumerate(names) for i in range(6)]
for p, b, l in rows: put(f"d/{l}/{p}", b)
with open("d.csv", "w") as f: f.write("path,label\n" + "".join(f"d/{l}/{p},{l}\n" for p, b, l in rows))
tar("t/data.tar", [m for p, b, l in rows for m in ((p, b), (p[:-3] + "cls", l))])
tar("j/data.tar", [m for p, b, l in rows for m in ((p, b), (p[:-3] + "json", json.dumps({"label": l})))])
parquet("q/data.parquet", [b for p, b, l in rows], [l for *_, l in rows])
E
doc "doctor --check-data d" "doctor --check-data d.csv" "doctor --check-data q" "doctor --check-data j" "doctor --check-data t"
for i in 1 2 3 4 5; do one_line $i || { [ "$(count $i)" = 3 ] && says $i '\b010\b' && says $i '\b001\b'; } || { rc=$(cat rc.$i); bad "labels 001, 002, 010 are $(count $i) classes: $(sed -n "${i}p" list)"; }; done
ok "3 classes from all"
