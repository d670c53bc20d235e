#!/usr/bin/env bash
# Pillow#8363, #2445; LlamaFactory#6300: PNG with more than 1 MB of ICC or text
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b
cat >m.py <<'E'
import io,os,struct,zlib
from PIL import Image
b=io.BytesIO();Image.open('d/a/0.png').save(b,'PNG');p=b.getvalue()
def ch(t,d):return p[:33]+struct.pack('>I',len(d))+t+d+struct.pack('>I',zlib.crc32(t+d))+p[33:]
z=zlib.compress
W=lambda n,d:open(n,'wb').write(d)
W('d/a/icc.png',ch(b'iCCP',b'icc\0\0'+z(os.urandom(10)*200000)))
W('d/a/ztxt.png',ch(b'zTXt',b'workflow\0\0'+z(b'x'*3000000)))
W('d/a/itxt.png',ch(b'iTXt',b'workflow\0\1\0\0\0'+z(b'x'*3000000)))
W('d/a/text.png',ch(b'tEXt',b'parameters\0'+b'x'*3000000))
W('d/a/exif.png',ch(b'eXIf',b'II*\0'+b'\xff'*500))
q=p
for i in range(80): q=q[:33]+struct.pack('>I',1000007)+b'tEXt'+b'k%04d\0\0'%i+b'x'*1000000+struct.pack('>I',zlib.crc32(b'tEXt'+b'k%04d\0\0'%i+b'x'*1000000))+q[33:]
W('d/b/manytext.png',q)
E
"$PY" m.py
tool doctor --check-data d; cat out | cut -c1-250; drc=$rc
train --data d --run-name r; trc=$rc; echo "train $rc $(tail -1 out|cut -c1-200)"
train --data d --run-name r2 --bad-images skip:0.9; echo "skip: $rc; $(grep -i 'bad\|skip' out | head -3 | cut -c1-300)"
tool predict logs/runs/r2 d; echo "predict $rc"; grep -v ' [0-9.]*$' out | head -5 | cut -c1-200
[ $drc = 0 ] && [ $trc = 0 ] && ok "metadata are passed over" || { rc=$drc; bad "doctor $drc, training $trc: files with whole pixels are refused"; }
