#!/usr/bin/env bash
# deepinv#525, NeMo-Run#571: a run whose name nobody chose meets a run of the same second (job arrays, sweeps)
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; many "train --data d --run-name r"; for s in $(seq 0 90); do cp -r logs/runs/r "logs/runs/$(date -d "+$s sec" +%Y%m%d-%H%M%S)-basic_cnn-ddp"; done
many "train --data d"; tbs; rc=$(cat rc.1); [ $rc = 0 ] && ok "another name: $(grep -o 'logs/runs/[^ ]*' out.1 | head -1)"; bad "$(tail -1 out.1)"
