#!/usr/bin/env bash
# timm#245, mmpretrain#870: EMA of a short run stands at chance
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
words="train --data digits --epochs 2 --batch-size 32"
many "$words --ema 0.9999 --run-name e1" "$words --ema 0.99998 --run-name e2" "$words --run-name raw"
tbs; res=""; for i in 1 2; do cat out.$i | grep -i 'top-1' | tail -1; done
"$PY" - <<'E' >g
import json
def last(n): return [x for x in map(json.loads,open(f'logs/runs/{n}/metrics.jsonl')) if x['kind']=='epoch'][-1]['val_top1']
for n in ('e1','e2'): print(n,{'val_top1':last(n),'raw_top1':last('raw')})
E
cat g; "$PY" - <<'E' && ok "$(tr '\n' ' ' <g)"
import ast
for l in open('g'):
    d=ast.literal_eval(l[3:]); v=[d['val_top1'],d['raw_top1']]
    assert max(v)-min(v)<=.02,d
E
grep -qi 'window' out.1 && ok "a note"; rc=0; bad "$(tr '\n' ' ' <g) and no note"
