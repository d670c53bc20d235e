#!/usr/bin/env bash
# Pillow#2574, unsloth#10094: a 16-bit PNG whose values end at 4095 (a 12-bit detector) is nearly black with 16 levels; right: a note, or the whole range is used
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
import numpy as np
for k, c in enumerate("ab"):
    os.makedirs(f"d/{c}")
    for i in range(8): Image.fromarray(np.random.default_rng(k * 99 + i).integers(0, 4096, (40, 40)).astype("uint16")).save(f"d/{c}/{i}.png")
E
doc "doctor --check-data d" "train --data d --run-name r"
says 1 '(12|16)[- ]bit|4095|decode numbers|dark' || says 2 '(12|16)[- ]bit|4095|decode numbers|dark' || bad "16 grey levels of 256 are left, and neither doctor nor train says so"
ok "$(grep -hiE '4095|bit|numbers|dark' out.1 out.2 | head -1)"
