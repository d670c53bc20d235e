#!/usr/bin/env bash
# own: the user's folder holds models/, training.py, random.py, and PYTHONPATH has a package models
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mkdir -p pp/models pp/training cw/models; for f in pp/models/__init__.py pp/training/__init__.py cw/models/__init__.py cw/training.py cw/random.py cw/launch.py cw/queue.py cw/delivery.py cw/planning.py cw/torch.py; do echo 'raise SystemExit("foreign module imported: "+__file__)' >$f; done
mk cw/d a b; cd cw; export PYTHONPATH=$W/pp; timeout 250 bash "$L" basic_cnn ddp 2 4 1 --data d --image-size 32 --workers 1 --log-dir "$W/logs" --run-name r --max-restarts 0 >../out 2>&1; rc=$?; echo "$rc $(last)"; tb; r1=$rc; f1=$(grep -c "foreign module" "$W/out")
timeout 100 "$PY" "$P/scripts/predict.py" "$W/logs/runs/r" d/a/0.png >"$W/out" 2>&1; rc=$?; echo "predict $rc $(last)"
timeout 100 "$PY" "$P/scripts/doctor.py" --data d >"$W/out2" 2>&1; echo "doctor $? $(tail -1 "$W/out2")"; f2=$(grep -c "foreign module" "$W/out2")
[ "$r1 $f1 $rc $f2" = "0 0 0 0" ] && ok "none was imported"; rc=$r1; bad "training exit $r1 ($f1 foreign), predict: $(last), doctor $f2 foreign"
