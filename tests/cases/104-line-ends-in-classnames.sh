#!/usr/bin/env bash
# own: classnames.txt is a name a line: a form feed, a vertical tab or U+2028 inside a name, or CR LF, moves no other name to another number
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
some = [m for i in range(18) for m in ((f"{i:02}.png", pic(i % 3)), (f"{i:02}.cls", str(i % 3)))]
for d, t in (("a", "cat\u2028big\ndog\nfox\n"), ("b", "cat\x0b\ndog\nfox\n"), ("c", "cat\r\ndog\r\nfox\r\n")): tar(f"{d}/data.tar", some); put(f"{d}/classnames.txt", t)
E
doc "doctor --check-data a" "doctor --check-data b" "doctor --check-data c"
for i in 1 2 3; do one_line $i || { [ "$(count $i)" = 3 ] && grep -aEq '│ *fox *│ *[3-6] ' out.$i; } || { rc=$(cat rc.$i); bad "3 lines are $(count $i) classes, fox has $(grep -aE '│ *fox' out.$i | tr -d '│' | tr -s ' ') images (train, validation)"; }; done; ok "$(tail -1 list)"
