#!/usr/bin/env bash
# own (cleanlab, fastdup users): byte-identical images in train/ and val/, and under two labels: the doctor says so
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d/train a b; mk d/val a b; cp d/train/a/*.png d/val/a/; cp d/train/a/0.png d/train/b/twin.png
mk e a b; for c in a b; do for i in 0 1 2 3 4 5 6 7; do cp e/$c/$i.png "e/$c/$i (1).png"; done; done
many "doctor --check-data d" "doctor --check-data e"; tbs; n=$(cat out.1 out.2 | grep -ci 'duplicate\|identical\|same image\|same content'); rc=$(cat rc.1)
[ $n -gt 0 ] && ok "$(grep -ih 'duplicate\|identical\|same' out.1 | head -1)"; bad "doctor: all of a's val images are copies of its training images, one image has two labels: no word; $(tail -1 out.1)"
