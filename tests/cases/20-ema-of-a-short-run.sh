#!/usr/bin/env bash
# timm#245, mmpretrain#870: EMA of a short run stands at chance
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
many "train --data digits --epochs 2 --batch-size 32 --ema 0.9999 --raw-accuracy --run-name e1" "train --data digits --epochs 2 --batch-size 32 --ema 0.99998 --raw-accuracy --run-name e2"
tbs; res=""; for i in 1 2; do cat out.$i | grep -i 'top-1' | tail -1; done
"$PY" - <<'E' >g
import json
for n in ('e1','e2'):
    r=[json.loads(l) for l in open(f'logs/runs/{n}/metrics.jsonl')]; e=[x for x in r if any('raw' in k for k in x)][-1]; print(n,{k:v for k,v in e.items() if 'top1' in k or 'raw' in k or 'accur' in k})
E
cat g; "$PY" - <<'E' && ok "$(tr '\n' ' ' <g)"
import ast
for l in open('g'):
    d=ast.literal_eval(l[3:]); v=[d['val_top1'],d['raw_top1']]
    assert max(v)-min(v)<=.02,d
E
grep -qi 'window' out.1 && ok "a note"; rc=0; bad "$(tr '\n' ' ' <g) and no note"
