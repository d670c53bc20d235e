#!/usr/bin/env bash
# webdataset#237, datasets#7150: names with dots (IMG.01.1.png) in a tar: images that get lost are counted, one by one, and named; right: all used, refused, or a note with their number
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
tar("t/data.tar", [m for d in ("IMG.%d.1", "x%d") for i in range(12) for m in ((d % i + ".png", pic(i % 2)), (d % i + ".cls", "ab"[i % 2]))])
E
doc "doctor --check-data t"
one_line 1 || says 1 'of 24 images' || says 1 'note.*\b12\b' || bad "12 of 24 images are lost, told as: $(grep -i note out.1)"
ok "$(tail -1 list)"
