# Sourced by each case: bash CASE PROJECT EMPTY_FOLDER. A case ends with one line, "ok: ..." or "WRONG (exit N): ...".
# shellcheck shell=bash disable=SC2034,SC2154
set -u
# tests/cases is in the path for lib.py, which makes inputs.
P=$(cd "$1" && pwd); W=$(cd "$2" && pwd); export P W OMP_NUM_THREADS=1 PYTHONPATH=$P:$P/tests/cases
PY=$P/.venv/bin/python; PATH=$P/.venv/bin:$PATH; L="$P/scripts/launch_distributed.sh"; cd "$W" || exit 9
mk() { "$PY" - "$@" <<'PYEOF'
import os, sys, random
from PIL import Image
n, s = int(os.environ.get("N", 8)), int(os.environ.get("SIZE", 40)); r = random.Random(1)
for k, c in enumerate(sys.argv[2:]):
    os.makedirs(f"{sys.argv[1]}/{c}", exist_ok=True)
    for i in range(n):
        px = bytearray(r.randbytes(s * s * 3)); px[k % 3::3] = bytes(s * s)
        Image.frombytes("RGB", (s, s), bytes(px)).save(f"{sys.argv[1]}/{c}/{i}.png")
PYEOF
}
train() { timeout 300 "$PY" "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 1 --batch-size 4 --image-size 32 --tensorboard false --report false --cache off --progress off --log-dir "$W/logs" "$@" >"$W/out" 2>&1; rc=$?; }
tool() { local t=$1; shift; timeout 300 "$PY" "$P/scripts/$t.py" "$@" >"$W/out" 2>&1; rc=$?; }
last() { grep -v '^ *$' "$W/out" | tail -1 | cut -c1-300; }
ok() { echo "ok: $*" | cut -c1-400; exit 0; }
bad() { echo "WRONG (exit ${rc:-?}): $*" | cut -c1-600; exit 1; }
tb() { grep -q '^Traceback' "$W/out" && bad "traceback: $(last)"; return 0; }
# many LINE...: runs the scripts of these lines ('train ...', 'predict ...') each in a fork of one warm process; out.N, rc.N
many() { "$PY" - "$@" <<'PYEOF'
import os, runpy, shlex, signal, sys, traceback
P = os.environ["P"]; sys.path.insert(0, P)
import torch, zerovision.delivery.evaluate, zerovision.delivery.predict, zerovision.training.run
os.environ.setdefault("ZV", "1")
BASE = "--model-type basic_cnn --epochs 1 --batch-size 4 --image-size 32 --tensorboard false --report false --cache off --progress off --log-dir logs"
for i, line in enumerate(sys.argv[1:], 1):
    words = shlex.split(line); sys.stdout.flush(); pid = os.fork()
    if not pid:
        fd = os.open(f"out.{i}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC); os.dup2(fd, 1); os.dup2(fd, 2); signal.alarm(250)
        name = {"train": "train_distributed"}.get(words[0], words[0])
        sys.argv = [f"{P}/scripts/{name}.py", *(BASE.split() if words[0] == "train" else []), *words[1:]]; rc = 0
        try: runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e: rc = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        except BaseException: traceback.print_exc(); rc = 1
        sys.stdout.flush(); sys.stderr.flush(); os._exit(rc)
    rc = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]); open(f"rc.{i}", "w").write(f"{rc}\n")
    lines = [l for l in open(f"out.{i}", errors="replace").read().split("\n") if l.strip()]
    print(f"{i} [{rc}] {line[:90]}: {(lines or [''])[-1][:260]}", flush=True)
PYEOF
}
tbs() { local f; for f in out.*; do grep -q '^Traceback' "$f" && { rc=$(cat "rc.${f#out.}"); bad "traceback in $f: $(grep -v '^ *$' "$f" | tail -1)"; }; done; return 0; }
doc() { many "$@" >list 2>&1; cat list; tbs; }                       # runs lines, prints one line each
count() { sed -n 's/.*: \([0-9]*\) classes.*/\1/p' "out.$1" | head -1; }   # classes that doctor found
one_line() { [ "$(cat "rc.$1")" = 2 ] && [ "$(grep -c '[^ ]' "out.$1")" -le 2 ]; }  # refused in a line
says() { grep -Eqi "$2" "out.$1"; }
