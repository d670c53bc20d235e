#!/usr/bin/env bash
# ultralytics#5173, fsdp_qlora#28: a script without a main guard, workers above 0
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; cat >t.py <<'E'
import sys,os
sys.path.insert(0,os.environ["P"]); open('times','a').write('x')
from zerovision.training.config import TrainConfig as C
from zerovision.training.run import run
print('returned',run(C(model_type="basic_cnn",epochs=1,data="d",image_size=32,workers="2",batch_size=4,log_dir='logs',tensorboard=False,cache='off')))
E
timeout 200 "$PY" t.py >out 2>&1; rc=$?; n=$(wc -c <times)
grep -q 'returned 0' out && [ "$n" = 1 ] && ok "trained; script imported once"
bad "the script ran $n times; $(grep -i 'error' out | tail -1 | cut -c1-250)"
