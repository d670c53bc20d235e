#!/usr/bin/env bash
# webdataset#157: shards with the same names in each (000.png ...) are different images, all of which count; the same name with the same bytes appended to one shard is told
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
for s in range(2): tar(f"t/data-{s:05}.tar", [m for k in range(2) for i in range(4) for m in ((f"{k}{i}.png", pic(k)), (f"{k}{i}.cls", "ab"[k]))])
one = [m for k in range(2) for i in range(6) for m in ((f"{k}{i}.png", pic(k)), (f"{k}{i}.cls", "ab"[k]))]
tar("u/data.tar", one + one)
E
doc "doctor --check-data t" "doctor --check-data u"
rc=$(cat rc.1); [ "$rc" = 0 ] && says 1 'of 16 images' || bad "two shards of 8: $(tail -1 out.1)"
one_line 2 || says 2 'note.*(twice|same|dupl|copies|held out)' || says 2 'of 12 images' || bad "a tar that was appended to itself: $(tail -1 out.2), no word of the same keys"
ok "$(tail -1 list)"
