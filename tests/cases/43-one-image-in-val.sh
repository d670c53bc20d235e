#!/usr/bin/env bash
# own: val with one image in a class; a class of one image in a folder that is split; val empty for a class
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d/train a b; mk d/val a; N=1 mk d/val b; N=1 mk e a; mk e b c; cp -r d f; rm f/val/b/*; cp -r d g; mkdir g/val/c; cp d/val/a/0.png g/val/c
many "train --data d --run-name r" "train --data e --run-name r2" "evaluate logs/runs/r2" "train --data f" "train --data g" "doctor --check-data e"; tbs; for i in 2 4 5 6; do tail -2 out.$i | cut -c1-250; done
r="$(for i in 1 2 3 4 5 6; do cat rc.$i; done | tr -d '\n')"; rc=$r; [ "$r" = 000220 ] || [ "$r" = 000221 ] && ok "$(grep -i 'held out\|no image\|one image' out.2 | head -1) codes $r"; bad "codes $r $(tail -1 out.2 | cut -c1-200)"
