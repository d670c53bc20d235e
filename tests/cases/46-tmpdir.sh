#!/usr/bin/env bash
# pytorch#143471 and own: TMPDIR missing, read-only, with a space, very long (AF_UNIX 108 bytes)
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; res=""; mkdir -p "t/with space" "t/$(printf 'x%.0s' $(seq 120))"
for t in "$W/t/nosuch" "$W/t/with space" "$W/t/$(printf 'x%.0s' $(seq 120))"; do TMPDIR="$t" timeout 200 bash "$L" basic_cnn ddp 2 4 1 --data d --image-size 32 --workers 1 --log-dir "$W/logs" --run-name r$RANDOM --max-restarts 0 >out 2>&1; rc=$?; echo "$t $rc $(last)"; tb; [ $rc = 0 ] || [ $rc = 2 ] || res="$res ${t##*/}($rc: $(last))"; done
[ -z "$res" ] && ok trains; bad "$res"
