#!/usr/bin/env bash
# Lightning#9590, #10336: training started from a thread
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cat >t.py <<'E'
import threading,sys,os
sys.path.insert(0,os.environ["P"])
from zerovision.training.config import TrainConfig as C
from zerovision.training.run import run
r=[]
t=threading.Thread(target=lambda:r.append(run(C(model_type='basic_cnn',epochs=1,data='d',image_size=32,batch_size=4,log_dir='logs',tensorboard=False))));t.start();t.join();print('returned',r)
E
mk d a b; timeout 200 "$PY" t.py >out 2>&1; rc=$?
grep -q 'returned \[0\]' out && ok trained; tb; bad "$(last)"
