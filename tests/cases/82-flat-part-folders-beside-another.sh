#!/usr/bin/env bash
# datasets#7880: train/, test/ and unlabeled/ of images alone are not three classes; right: refused, or told
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
for k, c in enumerate(("train", "test", "unlabeled")):
    for i in range(6): put(f"d/{c}/{i}.png", pic(k))
E
doc "doctor --check-data d"; one_line 1 || says 1 'note.*(train|test|part)' || bad "classes $(count 1), among them train and test, without a word"; ok "$(tail -1 list)"
