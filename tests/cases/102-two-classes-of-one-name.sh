#!/usr/bin/env bash
# own (ImageNet's short names have crane and maillot twice): classnames.txt with one name for two numbers: the two are not made one class without a word, as npz refuses it; right: refused, told, or both kept apart
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
tar("t/data.tar", [m for i in range(24) for m in ((f"{i:02}.png", pic(i % 4)), (f"{i:02}.cls", str(i % 4)))]); put("t/classnames.txt", "crane\nship\nmaillot\ncrane\n")
E
doc "doctor --check-data t"; one_line 1 || [ "$(count 1)" = 4 ] || says 1 'note.*(crane|twice|same)' || bad "4 labels are $(count 1) classes: crane has $(grep -aE '│ *crane' out.1 | tr -d '│' | tr -s ' ') images (train, validation), without a word"; ok "$(tail -1 list)"
