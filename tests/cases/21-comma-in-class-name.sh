#!/usr/bin/env bash
# ultralytics#23972: ImageNet's class names hold commas: --class-weights, CSVs
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d "tench, Tinca tinca" "b=c" "none"
many "train --data d --run-name r --class-weights 'tench, Tinca tinca=2'" "train --data d --run-name r2" "evaluate logs/runs/r2" "predict logs/runs/r2 d --format csv" "train --data d --run-name r4 --class-weights 'b=c=2'" "train --data d --run-name r5 --class-weights '\"tench, Tinca tinca\"=2'"; tbs
"$PY" -c "
import csv,glob
f=glob.glob('logs/runs/r2/evaluation/**/per_class.csv',recursive=True)[0];print(list(csv.reader(open(f)))[:4])"
[ "$(cat rc.1)" = 0 ] || [ "$(cat rc.6)" = 0 ] && ok "can be said"; rc=$(cat rc.1); bad "$(tail -1 out.1 | cut -c1-250)"
