#!/usr/bin/env bash
# geti#2559, fastai#1352: BatchNorm on one value; last batch of 1
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
N=9 mk d a b; many "train --data d --model-type timm:mobilenetv3_small_100 --image-size 32 --batch-size 1 --run-name a" "train --data d --model-type timm:resnet18 --image-size 32 --batch-size 1 --run-name b" "train --data d --batch-size 1 --image-size 16 --run-name c" "train --data d --batch-size 13 --run-name e --model-type mobilenet" "train --data d --batch-size 1 --model-type efficientnet --run-name f --image-size 16"; tbs
res=""; for i in 1 2 3 4 5; do c=$(cat rc.$i); [ $c = 0 ] || [ $c = 2 ] || res="$res $i($c: $(tail -1 out.$i | cut -c1-200))"; done; rc=1; [ -z "$res" ] && ok "trains or one line: $(cat rc.* | tr '\n' ' ') $(grep -h -i 'batchnorm' out.* | head -1)"; bad "$res"
