#!/usr/bin/env bash
# roboflow-python#153, yolov5#11775: train/valid/test; a test/ beside train/ and val/; loose images beside the class folders
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d train/a train/b valid/a valid/b test/a test/b
train --data d --run-name r1; echo "train/valid/test: $rc $(tail -1 out | cut -c1-300)"; r1=$rc; grep -q 'valid/' out || [ $rc = 0 ] || bad "refusal does not name valid/: $(last)"
mv d/valid d/val
train --data d --run-name r2; echo "train/val/test: $rc"; n2=$(grep -ci 'test' out); echo "  lines that name test/: $n2"
cp d/train/a/0.png d/train/loose.png; cp d/train/a/0.png d/loose.png
train --data d --run-name r3; n3=$(grep -ci 'loose\|beside\|not in a class' out); echo "loose images: $rc, lines: $n3"
[ $r1 = 0 ] && [ $n2 -gt 0 ] && [ $n3 -gt 0 ] && ok "all three are used or named"
bad "train/valid/test exit $r1; lines about unused test/: $n2; about loose images: $n3"
