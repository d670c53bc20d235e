#!/usr/bin/env bash
# ultralytics#24269: Parquet labels that are lists ([0], [0, 1]) are no classes named '[0, 1]'; right: several labels, or refused
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' || { [ $? = 77 ] && exit 0; bad "the input could not be made"; }
from lib import *
parquet("q/data.parquet", [pic(i) for i in range(18)], [([0], [1], [0, 1])[i % 3] for i in range(18)])
E
doc "doctor --check-data q"
one_line 1 || says 1 'note.*(list|several)' || bad "$(count 1) classes, such as '[0, 1]', without a word"; ok "$(tail -1 list)"
