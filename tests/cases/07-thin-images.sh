#!/usr/bin/env bash
# Depth-Anything-V2#256, unsloth#1946: a very thin image is enlarged along its long side before its centre is cut out
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d/train a b; mk d/val a b; mk base/train a b; mk base/val a b
"$PY" -c "
from PIL import Image
for c in 'ab':
    for i in range(2): Image.new('RGB',(3,9000),(9,99,9)).save(f'd/val/{c}/thin{i}.png')"
peak() { "$PY" -c "
import subprocess,sys,resource
r=subprocess.run(sys.argv[1:],stdout=open('out','w'),stderr=subprocess.STDOUT).returncode
print(r, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss//1024)" "$@"; }
T=("$PY" "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 1 --batch-size 4 --image-size 224 --tensorboard false --report false --cache off --progress off --log-dir logs)
set -- $(peak "${T[@]}" --data base --run-name b); a=$2; rc=$1
set -- $(peak "${T[@]}" --data d --run-name r); b=$2; rc=$1; tb
set -- $(peak "$PY" "$P/scripts/predict.py" logs/runs/b base); c=$2
tool doctor --check-data d; thin=$(grep -ci 'thin\|narrow\|aspect' out)
"$PY" -c "
from PIL import Image
Image.new('RGB',(3,65000),(9,99,9)).save('huge.png')"
set -- $(peak "$PY" "$P/scripts/predict.py" logs/runs/b huge.png); h=$2
[ $((b-a)) -lt 300 ] && [ $((h-c)) -lt 300 ] && ok "train +$((b-a)) MB, predict of 3x65000 +$((h-c)) MB"
bad "four of 3 x 9000 pixels in val: training +$((b-a)) MB; one file of 3 x 65000 in predict +$((h-c)) MB; lines of the doctor about thin images: $thin"
