#!/usr/bin/env bash
# paperbanana#240, PFERD#141: one class name in two Unicode forms
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' >names
import unicodedata as u
for p,f in (('train/','NFC'),('val/','NFD')): print(p+u.normalize(f,'caf\u00e9')); print(p+'th\u00e9')
E
mapfile -t N <names; n=${N[*]}; mk d "${N[@]}"
train --data d --run-name r; tb; [ $rc = 0 ] && ok "taken as one class: $(grep -i note out | head -1)"
grep -qi 'unicode\|NFC\|form' out && ok "refused, and says why: $(last)"
bad "$(last)"
