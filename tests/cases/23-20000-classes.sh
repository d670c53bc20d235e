#!/usr/bin/env bash
# torchmetrics#3387, libreyolo#883, fastai#2516: 20,000 classes of 2 images
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
import os
from PIL import Image
import io
b=io.BytesIO();Image.new('RGB',(8,8),(9,9,9)).save(b,'PNG');b=b.getvalue()
for i in range(20000):
    os.makedirs(f'd/c{i:05d}'); 
    for j in range(2): open(f'd/c{i:05d}/{j}.png','wb').write(b)
E
s=$SECONDS; "$PY" -c "
import subprocess,sys,resource
r=subprocess.run(sys.argv[1:],stdout=open('out','w'),stderr=subprocess.STDOUT,timeout=400).returncode
print(r, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss//1024)" "$PY" "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 1 --batch-size 512 --data d --image-size 16 --log-dir logs --run-name r --progress off >m; set -- $(cat m); rc=${1:-124}
sz=$(du -sm logs/runs/r | cut -f1); echo "exit $rc peak ${2:-?} MB seconds $((SECONDS-s)) folder $sz MB"; ls -la logs/runs/r logs/runs/r/evaluation
tb; [ $rc = 0 ] || bad "$(last)"; [ "${2:-99999}" -lt 6000 ] && [ "$sz" -lt 500 ] && ok "peak $2 MB, $((SECONDS-s)) s, run folder $sz MB"; bad "peak $2 MB, run folder $sz MB"
