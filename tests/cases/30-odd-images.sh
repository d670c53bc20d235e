#!/usr/bin/env bash
# own: HEIC, AVIF, animated WebP, JXL, ICO, PSD, SVG, PDF, CMYK+Adobe, 1x1, 16-bit grey, alpha, palette, wrong extension, zero bytes, APNG, jfif
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; cat >m.py <<'E'
import io,os,struct,zlib
from PIL import Image
im=Image.open('d/a/0.png').convert('RGB').resize((64,48)); s=lambda n,i=im,**k:i.save('o/'+n,**k)
os.makedirs('o')
try: s('x.avif')
except Exception: open('o/x.avif','wb').write(b'\0\0\0\x20ftypavif')
for n,h in (('x.heic',b'\0\0\0\x18ftypheic'),('x.jxl',b'\xff\x0a'),('x.psd',b'8BPS'),('x.svg',b'<svg/>'),('x.pdf',b'%PDF-1.4')): open('o/'+n,'wb').write(h+b'\0'*99)
s('x.ico'); s('x.jfif',format='JPEG'); s('x.jpe',format='JPEG'); s('UPPER.JPG',format='JPEG'); s('UP.PNG')
r=[Image.new('RGB',(40,40),c) for c in ('red','green','blue')]
r[0].save('o/anim.webp',save_all=True,append_images=r[1:],duration=9); r[0].save('o/anim.gif',save_all=True,append_images=r[1:],duration=9); r[0].save('o/apng.png',save_all=True,append_images=r[1:],duration=9)
s('cmyk.jpg',im.convert('CMYK')); s('1x1.png',im.resize((1,1))); s('1x1.jpg',im.resize((1,1))); s('g16.png',Image.frombytes('I;16',(40,40),struct.pack('<1600H',*range(0,64000,40))))
s('alpha.png',im.convert('RGBA')); s('la.png',im.convert('LA')); s('pal.png',im.convert('P')); s('pal_t.png',im.convert('P'),transparency=b'\0\x80\xff'); s('bit1.png',im.convert('1')); s('bit1.tif',im.convert('1'),compression='group4')
im.save('o/png_really.jpg',format='PNG'); im.save('o/jpg_really.png',format='JPEG'); im.save('o/webp_really.jpg',format='WEBP')
d=io.BytesIO(); im.save(d,'JPEG',quality=95); d=d.getvalue(); open('o/trailing.jpg','wb').write(d+b'\0'*5000); open('o/prog.jpg','wb').write(b''); im.save('o/prog.jpg',progressive=True)
s('icc.jpg',icc_profile=b'x'*70000); s('f.tif',im.convert('F').point(lambda v:v/255))
E
"$PY" m.py || bad m.py
cp o/* d/a/
mkdir bad bad/a bad/b; cp d/b/* bad/b; cp d/a/?.png bad/a; : >bad/a/zero.jpg; head -c 500 o/icc.jpg >bad/a/cut.jpg; echo '<html>404</html>' >bad/a/html.jpg; cp o/x.avif bad/a/avif.jpg; cp o/x.heic bad/a/heic.jpg
many "doctor --check-data d" "train --data d --run-name r" "predict logs/runs/r d/a --format csv" "doctor --check-data bad" "train --data bad --run-name r2" "train --data bad --run-name r3 --bad-images skip:0.6" "predict logs/runs/r bad" "predict logs/runs/r o/x.heic o/x.avif o/x.svg" "evaluate logs/runs/r --data bad --bad-images skip:0.6"; tbs
for i in 1 2 4 6 7 8; do echo "== $i"; grep -v '^ *$' out.$i | cut -c1-250 | head -24; done
r="$(cat rc.1 rc.2 rc.3 rc.4 rc.5 rc.6 rc.7 rc.8 rc.9 | tr '\n' ' ')"; rc=$r
[ "$r" = "0 0 0 1 2 0 1 1 0 " ] && ok "readable ones are read, others named ($r)"; bad "exit codes $r, expected 0 0 0 1 2 0 1 1 0; $(grep -ih 'cannot use\|error' out.1 out.2 | head -2 | cut -c1-200)"
