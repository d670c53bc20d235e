#!/usr/bin/env bash
# ollama#17916, ml-agents#4471: a container's CPU quota is not seen
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
unset OMP_NUM_THREADS; [ "$(nproc)" -ge 2 ] || ok "one core here: skipped"
a=$(awk '$3=="cgroup2"{print $2;exit}' /proc/mounts); b=$(awk '$3=="cgroup" && $4~/(^|,)cpu(,|$)/{print $2;exit}' /proc/mounts); q=""
for g in $a $b; do d=$g/zv$$; mkdir "$d" 2>/dev/null || continue; if { echo "100000 100000" >"$d/cpu.max"; } 2>/dev/null || { echo 100000 >"$d/cpu.cfs_quota_us"; } 2>/dev/null; then q=$d; break; fi; rmdir "$d"; done
[ -n "$q" ] || ok "no cgroup can be made here: skipped"
mk d a b
(echo $BASHPID >"$q/cgroup.procs" && timeout 200 bash "$L" basic_cnn ddp 1 4 1 --data d --image-size 32 --log-dir "$W/logs" --run-name r >out 2>&1); sleep 1; rmdir "$q"
c=$(grep -Eo '[0-9]+ threads? each' out); [ "$c" = "1 thread each" ] && ok "$c of a quota of 1"; rc=0; bad "'$c' under a quota of one core (${q%/*}); $(last)"
