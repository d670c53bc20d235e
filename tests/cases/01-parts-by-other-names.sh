#!/usr/bin/env bash
# ultralytics#4310, fastai#2336: Training/+Testing/ and other names of parts are taken for classes. Right: one line, or taken as parts
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
wrong=""
for pair in "Training Testing" "Train Val" "TRAIN TEST" "train test" "train validation" "train dev" "train holdout" "train eval" "Train Test"; do
  set -- $pair; D="$W/d-$1-$2"; mk "$D" "$1/glioma" "$1/none" "$2/glioma" "$2/none"
  tool doctor --check-data "$D"; drc=$rc
  train --data "$D" --run-name "r-$1-$2"
  n=$(grep -o '[0-9]* classes' "$W/out" | head -1)
  names=$("$PY" - "$W/logs/runs/r-$1-$2/model.safetensors" <<'E' 2>/dev/null
import json,struct,sys
f=open(sys.argv[1],'rb');h=json.loads(f.read(struct.unpack('<Q',f.read(8))[0]));print(h['__metadata__'].get('class_names') or [v for k,v in h['__metadata__'].items() if 'glioma' in v or 'rain' in v][:1])
E
)
  echo "$pair: doctor $drc, train $rc, $n $(echo $names | grep -o '.Train[^]]*\|.TRAIN[^]]*\|.glioma[^]]*' | head -1): $(tail -1 "$W/out" | cut -c1-160)"
  grep -q 'class_names.*glioma\|glioma' <<<"$names" || [ $rc = 2 ] || wrong="$wrong [$pair]"
done
[ -z "$wrong" ] && ok "no part was taken for a class" || bad "parts taken for classes without a word:$wrong"
