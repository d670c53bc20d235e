#!/usr/bin/env bash
# detectron2#1221: photographs of phones with 50 and 108 megapixels (8192x6144, 12000x9000 pixels) are read, as Pillow does up to 179 megapixels, or a flag that allows them is named
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
for k, c in enumerate("ab"):
    for i in range(5): put(f"d/{c}/{i}.png", pic(k))
    Image.new("L", (8192, 6144), 90 * k + 50).save(f"d/{c}/new.jpg", quality=20)
Image.new("L", (12000, 9000), 90).save("d/a/large.jpg", quality=20)
E
doc "doctor --check-data d"
rc=$(cat rc.1); [ "$rc" = 0 ] || says 1 'megapixels.*--[a-z]+-[a-z]' || bad "$(grep -i unreadable out.1 | head -1 | sed 's/.*: //')"
ok "$(tail -1 out.1)"
