#!/usr/bin/env bash
# own (pandas makes 1 a 1.0 beside an empty cell): labels 1.0 and 2.0 are refused in a table; from tar, JSON and Parquet of text the same answer, not classes named 1.0 and 2.0 there alone
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' || { [ $? = 77 ] && exit 0; bad "the input could not be made"; }
from lib import *
l = [("1.0", "2.0")[i % 2] for i in range(16)]; b = [pic(i) for i in range(16)]
for i in range(16): put(f"p/{i:02}.png", b[i])
put("d.csv", "path,label\n" + "".join(f"p/{i:02}.png,{l[i]}\n" for i in range(16)))
tar("t/data.tar", [m for i in range(16) for m in ((f"{i:02}.png", b[i]), (f"{i:02}.cls", l[i]))]); tar("j/data.tar", [m for i in range(16) for m in ((f"{i:02}.png", b[i]), (f"{i:02}.json", json.dumps({"label": l[i]})))])
parquet("q/data.parquet", b, l)
E
doc "doctor --check-data d.csv" "doctor --check-data t" "doctor --check-data j" "doctor --check-data q"
a=$(cat rc.1; count 1); for i in 2 3 4; do b=$(cat rc.$i; count $i); [ "$a" = "$b" ] || says $i 'note.*fraction' || { rc=$(cat rc.$i); bad "the table: exit $(cat rc.1) ($(tail -1 out.1 | cut -c1-90)), the same labels in another source: $(count $i) classes, exit 0"; }; done; ok "alike"
