#!/usr/bin/env bash
# webdataset#20: a tar sample of a photo .jpg and a mask .png: not the mask without a word; right: a refusal, a note, or the photo (first, or the jpg)
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
tar("t/data.tar", [m for i in range(16) for m in ((f"{i:02}.jpg", pic(i % 2, 40, "JPEG")), (f"{i:02}.cls", "ab"[i % 2]), (f"{i:02}.png", pic(2, 24)))])
E
doc "doctor --check-data t"
one_line 1 || says 1 'note.*(images|mask|png|jpg)' || says 1 'smallest image 40x40, largest 40x40' || bad "trains on the masks of 24 pixels, without a word: $(grep smallest out.1)"
ok "$(tail -1 list)"
