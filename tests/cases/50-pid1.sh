#!/usr/bin/env bash
# own: launcher as PID 1 of a container, docker stop (SIGTERM), zombie children
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
unshare -rpf --mount-proc true 2>/dev/null || ok "no namespaces: skipped"; N=40 mk d a b
unshare -rpf --mount-proc --kill-child bash "$L" basic_cnn ddp 1 4 400 --data d --image-size 32 --log-dir "$W/logs" --run-name r --report false >out 2>&1 & u=$!
for i in $(seq 900); do [ -s logs/runs/r/metrics.jsonl ] && break; sleep 0.2; done; sleep 2; c=$(ps -o pid= --ppid $u | head -1); kill -TERM $c; for i in $(seq 300); do kill -0 $u 2>/dev/null || break; sleep 0.2; done; kill -0 $u 2>/dev/null && { kill -9 $c; bad "PID 1 ignores SIGTERM for 60 s"; }
wait $u; rc=$?; [ $rc = 143 ] && ls -d logs/runs/r/checkpoints/step* >/dev/null && ok "saved, 143"; bad "$(last)"
