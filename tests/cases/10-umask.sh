#!/usr/bin/env bash
# sentence-transformers#4014, huggingface_hub#1215, datasets#2065: saved files follow the umask
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
umask 002; mk d a b
timeout 300 bash "$L" basic_cnn ddp 1 4 2 --data d --image-size 32 --ema 0.9 --log-dir "$W/logs" --run-name r >out 2>&1; rc=$?; [ $rc = 0 ] || bad "$(last)"
tool evaluate logs/runs/r; tool export logs/runs/r --format safetensors; tool export logs/runs/r --format onnx; tool export logs/runs/r --format torch-export; tool export logs/runs/r --format safetensors --precision bf16
tool predict logs/runs/r d --format csv --output labels.csv
find logs labels.csv -type f ! -perm 664 -printf '%m %p\n' | sort >odd; find logs -type d ! -perm 775 -printf '%m %p/\n' >>odd; cat odd
[ -s odd ] && bad "$(wc -l <odd) not 664/775: $(head -3 odd | tr '\n' ';')"; ok "all $(find logs -type f | wc -l) files 664"
