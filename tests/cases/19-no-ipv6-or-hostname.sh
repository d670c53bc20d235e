#!/usr/bin/env bash
# sglang#294, pytorch#52040, #131691: no IPv6, host name that does not resolve, only ::1, a stale GLOO_SOCKET_IFNAME
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; res=""
if unshare -rnu true 2>/dev/null; then
timeout 250 unshare -rnu sh -c 'hostname nosuch; ip link set lo up 2>/dev/null; sysctl -qw net.ipv6.conf.all.disable_ipv6=1 2>/dev/null; exec bash "$@"' x "$L" basic_cnn ddp 2 4 1 --data d --image-size 32 --log-dir "$W/logs" --run-name r1 >out 2>&1; rc=$?; echo "no ipv6, no name: $rc $(last)"; [ $rc = 0 ] || res="$res nosuch-host($rc: $(last))"; fi
GLOO_SOCKET_IFNAME=eth99 timeout 200 bash "$L" basic_cnn ddp 2 4 1 --data d --image-size 32 --log-dir "$W/logs" --run-name r3 --max-restarts 0 >out 2>&1; rc=$?; echo "eth99: $rc $(last)"; [ $rc = 0 ] || { grep -q 'eth99\|GLOO_SOCKET' out || res="$res eth99($rc: $(last))"; grep -q Traceback out && res="$res eth99-traceback"; }
timeout 200 torchrun --nproc_per_node=2 --master_addr=::1 --master_port=29544 "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 1 --data d --image-size 32 --batch-size 4 --log-dir logs --run-name r2 >out 2>&1; rc=$?; echo "::1: $rc $(last)"; [ $rc = 0 ] || res="$res ::1($rc: $(last))"
[ -z "$res" ] && ok trains; bad "$res"
