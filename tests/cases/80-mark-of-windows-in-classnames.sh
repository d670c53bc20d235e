#!/usr/bin/env bash
# eyegrade#70, gtfslib#18: classnames.txt with a byte order mark, CR LF and blanks at the ends: the class is cat, not \ufeffcat
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
tar("t/data.tar", [m for i in range(16) for m in ((f"{i:02}.png", pic(i % 2)), (f"{i:02}.cls", str(i % 2)))])
put("t/classnames.txt", b"\xef\xbb\xbfcat \r\ndog\r\n")
E
doc "train --data t --run-name r" "predict logs/runs/r t/data.tar" "train --data t --run-name w --class-weights cat=2,dog=1"
rc=$(cat rc.1); [ "$rc" = 2 ] && ok "refused: $(head -1 list)"; [ "$rc" = 0 ] || bad "$(head -1 list)"
"$PY" - >g 2>&1 <<'E' || bad "classes in the weights: $(tail -1 g)"
import json, struct
f = open("logs/runs/r/model.safetensors", "rb"); t = json.dumps(json.loads(f.read(struct.unpack("<Q", f.read(8))[0]).decode())["__metadata__"])
print("with a mark" if "ufeff" in t else "with a blank" if "cat " in t else "cat, dog"); assert "ufeff" not in t and "cat " not in t and "cat" in t
E
rc=$(cat rc.3); [ "$rc" = 0 ] || bad "--class-weights cat=2: $(tail -1 list)"; ok "$(tail -1 g)"
