#!/usr/bin/env bash
# kubeflow/trainer#1790, sdk#142: pods get RANK, WORLD_SIZE, MASTER_ADDR, no LOCAL_RANK
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b
RANK=0 WORLD_SIZE=2 MASTER_ADDR=pod-0 MASTER_PORT=23456 timeout 200 bash "$L" basic_cnn ddp 1 4 1 --data d --image-size 32 --log-dir "$W/logs" --run-name r >out 2>&1; rc=$?; echo "launcher $rc $(last)"; l=$rc; n=$(grep -ci 'WORLD_SIZE\|this machine alone\|RANK=' out)
RANK=0 WORLD_SIZE=2 MASTER_ADDR=pod-0 MASTER_PORT=23456 train --data d; echo "python $rc $(last)"; tb; [ $rc = 2 ] || bad "python: $(last)"
[ $l = 2 ] || [ $n -gt 0 ] && ok "the launcher says it"; rc=$l; bad "launcher drops RANK and WORLD_SIZE in silence: each pod trains a model of its own"
