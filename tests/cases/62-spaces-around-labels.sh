#!/usr/bin/env bash
# turicreate#1531, DIGITS#420: 'cat' and 'cat ' in a table are one class, also where a blank follows each comma; right: one class, a refusal, or a note that names them
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
with open("t.csv", "w") as f:
    f.write("path,label\n")
    for i in range(24): put(f"p/{i}.png", pic(i)); f.write(f"p/{i}.png,{('cat', 'cat ', ' cat', 'dog')[i % 4]}\n")
E
doc "doctor --check-data t.csv"
one_line 1 || [ "$(count 1)" = 2 ] || says 1 'note.*(space|blank|alike|same|differ)' || bad "cat, 'cat ' and ' cat' are $(( $(count 1) - 1 )) classes without a word"
ok "$(tail -1 list)"
