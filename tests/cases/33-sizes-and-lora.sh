#!/usr/bin/env bash
# own: evaluating with another image size, --epochs lowered on resume, a LoRA run exported and predicted, class subset
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b c; mk one a b; mkdir -p ren; 
"$PY" -c "
import os,sys
sys.path.insert(0,os.environ['P']);import torch,timm;torch.manual_seed(0);torch.save(timm.create_model('vit_tiny_patch16_224',img_size=32,num_classes=3).state_dict(),'w.pt')"
many "train --data d --run-name r --epochs 3" "train --data d --run-name r --epochs 1 --resume auto" "train --data d --run-name r --epochs 3 --resume auto" "evaluate logs/runs/r --data one" "evaluate logs/runs/r --data one --allow-missing-classes" "train --data d --run-name l --model-type timm:vit_tiny_patch16_224 --tune lora:4 --weights w.pt" "evaluate logs/runs/l" "export logs/runs/l --format onnx" "export logs/runs/l --format safetensors" "predict logs/runs/l/export/timm-vit_tiny_patch16_224-fp32.safetensors d/a/0.png" "train --data d --run-name l2 --model-type timm:vit_tiny_patch16_224 --weights logs/runs/l/model.safetensors --image-size 64" "train --data d --run-name e --image-size 32:64" "evaluate logs/runs/e" "train --data d --run-name r --epochs 3 --resume auto --image-size 64"; tbs
for i in 2 3 4 14; do echo "== $i"; tail -3 out.$i | cut -c1-300; done; ls logs/runs/l/export
r=$(for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do cat rc.$i; done | tr '\n' ' '); rc=$r; case "$r" in "0 "[02]" "[02]" 2 0 0 0 0 0 "[02]" 0 0 0 2 ") ok "$r; lowered: $(tail -1 out.2 | cut -c1-150)";; esac; bad "codes $r; $(for i in 6 7 8 9 11 12 13; do [ $(cat rc.$i) = 0 ] || tail -1 out.$i | cut -c1-150; done)"
