#!/usr/bin/env bash
# own: a user id without an entry in passwd and without HOME (docker -u 12345, OpenShift)
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
[ "$(id -u)" = 0 ] && command -v setpriv >/dev/null || ok "not root: skipped"
mk d a b; mkdir logs; chmod 777 . logs; chmod -R a+rX d
su() { env -u HOME -u USER -u LOGNAME OMP_NUM_THREADS=1 setpriv --reuid 12345 --regid 12345 --clear-groups "$@"; }
su test -r "$P/scripts/train_distributed.py" -a -x "$PY" && su test -r "$W/d/a/0.png" || ok "folders not readable to others: skipped"
res=""; su timeout 200 bash "$L" basic_cnn ddp 1 4 1 --data "$W/d" --image-size 32 --log-dir "$W/logs" --run-name r >out 2>&1; rc=$?; echo "train $rc $(last)"; tb; [ $rc = 0 ] || res="train($rc: $(last))"
su timeout 100 "$PY" "$P/scripts/evaluate.py" logs/runs/r >out 2>&1; rc=$?; echo "evaluate $rc $(last)"; tb; [ $rc = 0 ] || res="$res evaluate($rc: $(last))"
su timeout 100 "$PY" "$P/scripts/doctor.py" --log-dir logs >out 2>&1; rc=$?; echo "doctor $rc $(last)"; tb
[ -z "$res" ] && ok trains; bad "$res"
