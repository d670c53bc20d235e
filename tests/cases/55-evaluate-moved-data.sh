#!/usr/bin/env bash
# own: the training folder was moved (or is reached by a link or a mount); evaluate --data NEWPLACE must not score the training images without a word
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
N=20 mk d a b; many "train --data d --run-name r --epochs 3" "evaluate logs/runs/r --data d"; n0=$(grep -o '[0-9,]* images' out.2 | head -1); cp -r d d2; ln -s d d3; mv d d4
many "evaluate logs/runs/r --data d2" "evaluate logs/runs/r --data d3" "evaluate logs/runs/r --data d4" "evaluate logs/runs/r"; tbs
ls -d logs/runs/r/eval*; for i in 1 3 4; do echo "== $i"; head -5 out.$i | cut -c1-250; done; echo "held out: $n0"
n1=$(grep -o '[0-9,]* images' out.1 | head -1); n3=$(grep -o '[0-9,]* images' out.3 | head -1); rc=$(cat rc.1)
[ "$n1" = "$n0" ] && [ "$n3" = "$n0" ] && ok "held-out part found again: $n1"; grep -qi 'trained on\|training images\|same images\|fingerprint' out.1 && ok "told: $(grep -i 'trained on\|training images\|fingerprint' out.1 | head -1)"
bad "scores $n1 (held out were $n0): the images it was trained on are among them, no word"
