#!/usr/bin/env bash
# own: disk full while TensorBoard writes and the report is made
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
unshare -rm true 2>/dev/null || ok "no namespaces: skipped"; mk d a b; mkdir logs
timeout -k 5 700 unshare -rm bash -c 'mount -t tmpfs -o size=3m none logs || exit 9; "$0" "$1/scripts/train_distributed.py" --model-type basic_cnn --epochs 3 --batch-size 4 --image-size 32 --data d --cache off --progress off --log-dir logs --run-name r >out 2>&1; echo $? >code; df logs | tail -1 >df; find logs -type f -printf "%s %p\n" >files' "$PY" "$P"; rc=$(cat code); cat df; sort -n files | tail -5; tb
[ $rc = 0 ] && ok "ended well: $(grep -i 'space\|failed' out | head -1)"; grep -qi 'space' out && [ $rc = 74 -o $rc = 2 ] && ok "$(last)"; bad "$(last)"
