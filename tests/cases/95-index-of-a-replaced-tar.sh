#!/usr/bin/env bash
# ultralytics#26207, yolov5#306, #2121: a tar replaced by one of equal size and time (cp -p, tar --mtime) with other labels: not the old index without a word
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
b = [pic(i % 2) for i in range(16)]
for d, c in (("t", "ab"), ("new", "xy")): tar(f"{d}/data.tar", [m for i in range(16) for m in ((f"{i:02}.png", b[i]), (f"{i:02}.cls", c[i % 2]))])
for d in ("t", "new"): os.utime(f"{d}/data.tar", (1.7e9, 1.7e9))
E
doc "doctor --check-data t"; says 1 '\ba\b' || bad "$(tail -1 list)"; cp -p new/data.tar t/data.tar; doc "doctor --check-data t"
rc=$(cat rc.1); one_line 1 || says 1 '\bx\b.*[0-9]' || bad "labels x and y now, the old index says $(grep -aoE '│ *[ab] ' out.1 | tr -d '│ ' | tr '\n' ' ')"; ok "$(tail -1 list)"
