#!/usr/bin/env bash
# own + PyTorch: two launches with the same exported MASTER_PORT; two GPUs asked where there is none
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; export MASTER_PORT=29611; for i in 1 2; do timeout 200 bash "$L" basic_cnn ddp 2 4 2 --data d --image-size 32 --log-dir "$W/logs" --run-name r$i --max-restarts 0 >o$i 2>&1 & p[$i]=$!; done; r=""; for i in 1 2; do wait ${p[$i]}; r="$r $?"; done; tail -qn1 o1 o2 | cut -c1-250; cp o1 out; grep -q Traceback o1 o2 && { rc="$r"; bad "traceback"; }
rc=$r; case "$r" in " 0 0") ok "both train";; *) grep -qh '29611' o1 o2 && ok "one line names the port: codes$r"; bad "$(tail -qn1 o1 o2 | tr '\n' '|')";; esac
