#!/usr/bin/env bash
# timm, torchvision, Lightning, HF transformers, ultralytics: weights trained by peers start a run
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# The report had an average 0.5 off in every weight: a network so far off diverges, which is exit code 78.
mk d a b
cat >m.py <<'E'
import os,sys,argparse,types,pickle
sys.path.insert(0,os.environ["P"]); import torch,timm,json
torch.manual_seed(0); m=timm.create_model('resnet18',num_classes=2); sd=m.state_dict(); ema={k:v*1.001 if v.is_floating_point() else v.clone() for k,v in sd.items()}
ns=argparse.Namespace(model='resnet18',lr=.1); S=torch.save
S({'epoch':1,'arch':'resnet18','state_dict':sd,'state_dict_ema':ema,'optimizer':{},'args':ns,'version':2,'metric':1.0},'timm.pth.tar')
S({'epoch':1,'state_dict':sd,'state_dict_ema':ema},'timm_noargs.pth.tar')
S({'model':sd,'model_ema':{'n_averaged':torch.tensor(1),**{'module.'+k:v for k,v in ema.items()}},'args':ns,'epoch':1,'optimizer':{}},'torchvision.pth')
S({'state_dict':{'model.'+k:v for k,v in sd.items()},'hyper_parameters':{},'pytorch-lightning_version':'2.5','epoch':0},'lightning.ckpt')
S({'state_dict':{'net.'+k:v for k,v in sd.items()}},'net.ckpt')
S({'module.'+k:v for k,v in sd.items()},'ddp.pt'); S({'_orig_mod.module.'+k:v for k,v in sd.items()},'compiled_ddp.pt'); S({'module._orig_mod.'+k:v for k,v in sd.items()},'ddp_compiled.pt')
S(sd,'plain.pt')
from safetensors.torch import save_file
save_file({k:v.contiguous() for k,v in sd.items()},'plain.safetensors')
save_file({'vit.embeddings.cls_token':torch.zeros(1,1,8),'vit.encoder.layer.0.attention.attention.query.weight':torch.zeros(8,8),'classifier.weight':torch.zeros(2,8)},'hf_vit.safetensors')
mod=types.ModuleType('ultralytics'); nn=types.ModuleType('ultralytics.nn'); sys.modules['ultralytics']=mod; sys.modules['ultralytics.nn']=nn
class Evil(torch.nn.Linear):
    def __reduce__(self): return (os.system,('touch RAN',))
Evil.__module__='ultralytics.nn'; nn.Evil=Evil
S({'model':Evil(2,2),'ema':None,'train_args':{}},'yolo-cls.pt')
S(m,'whole_model.pt')
E
"$PY" m.py || bad "m.py"
F="timm.pth.tar timm_noargs.pth.tar torchvision.pth lightning.ckpt net.ckpt ddp.pt compiled_ddp.pt ddp_compiled.pt plain.pt plain.safetensors hf_vit.safetensors yolo-cls.pt whole_model.pt"
set --; for f in $F; do set -- "$@" "train --data d --model-type timm:resnet18 --stem keep --batch-size 8 --weights $f --run-name r-$f"; done
many "$@"; tbs; [ -e RAN ] && bad "a pickle ran code"
res=""; i=0; for f in $F; do i=$((i+1)); c=$(cat rc.$i); case $f in hf*|yolo*|whole*) [ $c = 2 ] || res="$res $f($c)";; timm.*|timm_*|torchvision*) { [ $c = 0 ] && grep -qi 'ema\|average' out.$i; } || res="$res $f(exit $c$([ $c = 0 ] && echo ', raw weights taken, no word about the EMA'))";; *) [ $c = 0 ] || res="$res $f($c)";; esac; done
rc=0; [ -z "$res" ] && ok "all start or are refused in a line"; bad "$res"
