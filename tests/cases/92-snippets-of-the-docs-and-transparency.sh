#!/usr/bin/env bash
# vision#5510, sd-scripts#1269: the Python lines of the guides give predict's pixels for a transparent PNG (white behind) and a turned photograph (upright)
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
from lib import *
import glob, re, types
import numpy as np
from PIL import ImageOps
blocks = re.findall(r"```python\n(.*?)```", "\n".join(open(f, encoding="utf-8").read() for f in glob.glob(os.environ["P"] + "/docs/**/*.md", recursive=True)), re.S); bad, tried = [], 0
clear = Image.new("RGBA", (64, 64), (200, 30, 30, 0)); clear.paste((20, 180, 40, 255), (0, 0, 64, 20)); clear.save("clear.png")
turned = Image.new("RGB", (64, 64), (0, 0, 255)); turned.paste((255, 0, 0), (0, 0, 20, 64)); e = Image.Exif(); e[0x112] = 6; turned.save("turned.jpg", exif=e, quality=95)
class Stop(Exception): pass
class Session:
    def __init__(self, *a, **k): pass
    def get_modelmeta(self): return types.SimpleNamespace(custom_metadata_map={"class_names": "[]", "preprocessing": "{}"})
    def run(self, outputs, feed): raise Stop(next(iter(feed.values())))
sys.modules["onnxruntime"] = types.SimpleNamespace(InferenceSession=Session)
for f in re.findall(r"\"([^\"]*preprocessing\.json)\"", "".join(blocks)): put(f, json.dumps({"input": {"shape": [1, 3, 64, 64]}, "mean": [0, 0, 0], "std": [1, 1, 1], "resize_size": None, "class_names": []}))
def right(name):
    i = ImageOps.exif_transpose(Image.open(name)).convert("RGBA"); w = Image.new("RGBA", i.size, (255,) * 4); w.alpha_composite(i); return np.asarray(w.convert("RGB"), float)
for b in blocks:
    if "photo." not in b or "onnxruntime" not in b: continue
    for name in ("clear.png", "turned.jpg")["photo.png" not in b:]:
        try: exec(re.sub(r"photo\.\w+", name, b), {})
        except Stop as x: got = np.asarray(x.args[0], float)
        except Exception as x: bad.append(f"{name}: {x!r}"); continue
        got = got[0]; got = got.transpose(1, 2, 0) if got.shape[0] == 3 else got; got = got * 255 if got.max() <= 1.01 else got; tried += 1
        if got.shape != right(name).shape or abs(got - right(name)).mean() > 8: bad.append(f"{name} in the lines with {re.search('Image.open.*', b).group(0)[:60]}")
open("bad", "w").write("; ".join(bad)); open("tried", "w").write(str(tried)); print(tried, bad)
E
rc=0; [ -e bad ] || bad "the lines could not be tried"; [ -s bad ] && bad "other pixels than predict's: $(cat bad)"; ok "$(cat tried) read as predict does"
