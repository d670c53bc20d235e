#!/usr/bin/env bash
# wandb#3468, #5591, #5439: the table of runs shows the best epoch's score, of the saved weights, not that of the last; right: define_metric with a summary, run.summary, or a metric with best in its name
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mkdir -p stub/wandb stub/mlflow
cat >stub/wandb/__init__.py <<'E'
import json, os
def note(*a): open(os.environ["STUB"], "a").write(json.dumps(a, default=str) + "\n")
class Error(Exception): pass
class Settings:
    def __init__(self, **k): pass
class AlertLevel: ERROR = "ERROR"
class Image:
    def __init__(self, *a, **k): pass
Html = Image
class Summary(dict):
    def __setitem__(self, k, v): note("summary", k, v); super().__setitem__(k, v)
    def update(self, *a, **k): note("summary", dict(*a, **k))
class Run:
    def __init__(self): self.summary = Summary()
    def log(self, v, step=None): note("log", sorted(v), step)
    def define_metric(self, *a, **k): note("define_metric", a, k)
    def __getattr__(self, name): return lambda *a, **k: None
run = None
def init(**k):
    global run; run = Run(); note("init"); return run
def define_metric(*a, **k): note("define_metric", a, k)
E
cat >stub/mlflow/__init__.py <<'E'
import json, os
LIMIT = int(os.environ.get("LIMIT", 10**9))
def note(*a): open(os.environ["STUB"], "a").write(json.dumps(a, default=str) + "\n")
class MlflowException(Exception): pass
exceptions = type("exceptions", (), {"MlflowException": MlflowException})
def get_experiment_by_name(n): return None
def start_run(*a, **k): note("start"); return type("R", (), {"info": type("I", (), {"run_id": "1"})})
def log_params(p, *a, **k):
    long = [k for k, v in p.items() if len(str(v)) > LIMIT]
    if long: raise MlflowException(f"INVALID_PARAMETER_VALUE: Param value of '{long[0]}' exceeds length limit of {LIMIT} characters")
    note("params", sorted(p))
def log_param(k, v, *a, **kw): log_params({k: v})
def log_metrics(m, step=None, *a, **k): note("metrics", sorted(m), step)
def log_metric(n, v, step=None, *a, **k): log_metrics({n: v}, step)
def __getattr__(name): return lambda *a, **k: None
E
export STUB=$W/calls PYTHONPATH=$P:$W/stub
mk d a b; train --data d --epochs 2 --loggers wandb --run-name r; tb; [ $rc = 0 ] || bad "$(last)"
grep -q '"log"' calls 2>/dev/null || bad "nothing was logged: $(grep -i wandb out | head -1) $(tail -1 logs/runs/r/trackers/wandb.log)"
grep -Eq '"define_metric".*(summary|goal)|"summary"|"log".*best' calls || bad "no define_metric, no summary, no best_...: the run's val_top1 is that of the last epoch"
ok "$(grep -E 'define_metric|"summary"|best' calls | head -1)"
