#!/usr/bin/env bash
# own: the training folder got a few new images (or lost one); evaluate without --split then scores the images it was trained on
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
N=20 mk d a b; many "train --data d --run-name r --epochs 3"; cp d/a/0.png d/a/new.png; cp -r d d2
many "evaluate logs/runs/r" "evaluate logs/runs/r --data d2"; tbs; for i in 1 2; do cut -c1-250 out.$i | head -3; done
rc=$(cat rc.2); [ $rc = 2 ] && ok "refused: $(tail -1 out.2)"; grep -qi 'trained on\|training images\|changed' out.2 && ok "told: $(grep -i 'trained on\|training images\|changed' out.2 | head -1)"; grep -q 'val)' out.1 && grep -q 'val)' out.2 && ok "held-out part: $(head -1 out.2)"
bad "one image more, then: $(grep -h 'on [0-9]* images' out.1 out.2 | grep -o 'on [0-9]* images.*' | tr '\n' ';') - the training images are scored without a word"
