#!/usr/bin/env bash
# webdataset#157: a key that is in a tar twice (appended later, or one behind the other): not the old image, nor the loss of one, without a word; right: refused with the key, or told, or the later one
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
some = [m for k in range(2) for i in range(6) for m in ((f"{k}{i}.png", pic(k)), (f"{k}{i}.cls", "ab"[k]))]
tar("t/data.tar", [("00.png", pic(0)), ("00.cls", "a"), ("00.png", pic(1, 24)), ("00.cls", "b"), *some[2:]])
tar("u/data.tar", [*some, ("00.png", pic(1, 24)), ("00.cls", "b")])
E
doc "doctor --check-data t" "doctor --check-data u"
for i in 1 2; do one_line $i || says $i 'note.*(twice|00|same|dupl)' || { says $i 'smallest image 24x24' && says $i ' 12 images cannot'; } || { rc=$(cat rc.$i); bad "$(grep 'cannot be used' out.$i), $(grep smallest out.$i): of 12 keys, one there twice, no word"; }; done
ok "$(tail -1 list)"
