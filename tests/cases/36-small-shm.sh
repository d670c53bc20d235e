#!/usr/bin/env bash
# own: /dev/shm of 64 MB (docker), workers 2, 2 ranks
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
unshare -rm true 2>/dev/null || ok "no namespaces: skipped"; SIZE=64 mk d a b
timeout 350 unshare -rm sh -c 'mount -t tmpfs -o size=64m none /dev/shm || exit 0; exec bash "$@"' x "$L" basic_cnn ddp 2 16 1 --data "$W/d" --image-size 224 --workers 2 --log-dir "$W/logs" --run-name r --max-restarts 0 >out 2>&1; rc=$?; tb
[ $rc = 0 ] && ok "$(grep -i shm out | head -1)"; [ $rc = 2 ] && grep -qi shm out && ok "one line: $(last)"; bad "$(last)"
