#!/usr/bin/env bash
# own: the ssh connection drops (SIGHUP) during a training with the launcher
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
N=60 mk d a b; bash "$L" basic_cnn ddp 1 4 400 --data d --image-size 32 --log-dir "$W/logs" --run-name r --report false >out 2>&1 & l=$!
for i in $(seq 600); do [ -s logs/runs/r/metrics.jsonl ] && break; sleep 0.2; done; sleep 3; kill -HUP $l; s=$SECONDS; for i in $(seq 300); do kill -0 $l 2>/dev/null || break; sleep 0.2; done
if kill -0 $l 2>/dev/null; then kill -TERM $l; wait $l; echo "went on after SIGHUP"; ok "training goes on after SIGHUP; TERM ends it with $?"; fi
wait $l; rc=$?; sleep 1; left=$(pgrep -f "$W/logs" | wc -l); ls logs/runs/r/checkpoints | head -3; tail -2 out | cut -c1-200
[ $left = 0 ] || bad "SIGHUP left $left processes"; ls -d logs/runs/r/checkpoints/step* >/dev/null 2>&1 && ok "saved and ended with $rc"; bad "SIGHUP: nothing saved, $(last)"
