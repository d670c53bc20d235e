#!/usr/bin/env bash
# own: the disk is full at the last checkpoint: SIGTERM, then SIGINT, end the waiting
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
unshare -rm true 2>/dev/null || ok "no namespaces: skipped"; mk d a b; mkdir logs
unshare -rm bash -c 'mount -t tmpfs -o size=3m none logs || exit 9; exec "$0" "$1/scripts/train_distributed.py" --model-type basic_cnn --epochs 3 --batch-size 4 --image-size 32 --data d --cache off --progress off --log-dir logs --run-name r' "$PY" "$P" >out 2>&1 & u=$!
for i in $(seq 600); do [ "$(grep -c 'could not be saved' out)" -ge 5 ] && break; kill -0 $u 2>/dev/null || break; sleep 0.2; done
kill -0 $u 2>/dev/null || { wait $u; rc=$?; ok "ended by itself with $rc"; }
kill -TERM $u; for i in $(seq 20); do kill -0 $u 2>/dev/null || break; sleep 1; done; a=$i; kill -INT $u 2>/dev/null; for i in $(seq 10); do kill -0 $u 2>/dev/null || break; sleep 1; done
if kill -0 $u 2>/dev/null; then kill -9 $u; wait $u 2>/dev/null; rc=137; tb; bad "SIGTERM for 20 s and SIGINT for 10 s after it did not end the waiting for disk space; $(last | cut -c1-100)"; fi
wait $u; rc=$?; ok "ended after $a s with $rc"
