#!/usr/bin/env bash
# own: EXIF orientation 5-8 in JPEG (fast path), PNG, WebP, TIFF: evaluate, predict and doctor see the turned image
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cat >m.py <<'E'
import os
from PIL import Image
def ex(o):
    e=Image.Exif(); e[0x112]=o; return e
T=Image.Transpose; inv={1:None,2:T.FLIP_LEFT_RIGHT,3:T.ROTATE_180,4:T.FLIP_TOP_BOTTOM,5:T.TRANSPOSE,6:T.ROTATE_90,7:T.TRANSVERSE,8:T.ROTATE_270}
im=Image.new('RGB',(200,320)); 
for y in range(320):
    for x in range(200): im.putpixel((x,y),(x%256,y*255//320,(x*y)%97))
os.makedirs('d/a'); os.makedirs('d/b')
for o,t in inv.items():
    q=im if t is None else im.transpose(t)
    for f,k in (('jpg',dict(quality=98,subsampling=0)),('png',{}),('webp',dict(lossless=True)),('tif',{})): q.save(f'd/a/{o}.{f}',exif=ex(o),**k); q.save(f'd/b/{o}.{f}',exif=ex(o),**k)
E
"$PY" m.py; many "train --data d --run-name r --image-size 48" "predict logs/runs/r d/a --format json --output p"; tbs; [ "$(cat rc.2)" = 0 ] || bad "$(tail -1 out.2)"
"$PY" - >v 2>&1 <<'E' && ok "$(tail -1 v)"
import os,sys,json
sys.path.insert(0,os.environ['P']); import numpy as np
from zerovision.training.data.reading.decode import make_decoder
for name in ('cpu','exact'):
    d=make_decoder(name,48); read=lambda path: d(open(path,'rb').read()).astype(int); ref=read('d/a/1.png')
    for o in range(1,9):
        for f in ('jpg','png','webp','tif'):
            x=read(f'd/a/{o}.{f}'); assert x.shape==ref.shape and abs(x-ref).mean()<12,(name,o,f,x.shape,ref.shape,abs(x-ref).mean() if x.shape==ref.shape else None)
r=[json.loads(l) for l in open('p')]; print(len(r),'images, all orientations agree')
E
rc=1; bad "$(tail -1 v)"
