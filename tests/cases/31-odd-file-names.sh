#!/usr/bin/env bash
# own: file names with newline, carriage return, quotes, right-to-left, 255 bytes, invalid UTF-8, comma, escape codes
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; "$PY" - <<'E'
import shutil
for n in (b'new\nline.png',b'q"uo\'te.png','\u202egnp.exe.png'.encode(),b'x'*251+b'.png',b'inv\xff\xfealid.png',b'co,mma.png',b'=cmd|A1.png',b'X.png',b'x.png',b' lead.png',b'-dash.png',b'tab\t.png',b'back\\slash.png','\U0001f600.png'.encode(),b'%s%d{0}.png',b'esc\x1b[31m.png',b'cr\r.png'): shutil.copy(b'd/a/0.png',b'd/a/'+n)
E
export LC_ALL=C.UTF-8
many "doctor --check-data d" "train --data d --run-name r" "predict logs/runs/r d --format csv --output p.csv" "predict logs/runs/r d --format json --output p.json" "predict logs/runs/r d" "evaluate logs/runs/r --split all"; tbs
r="$(cat rc.[1-6] | tr -d '\n')"; rc=$r; [ "$r" = 000000 ] || bad "codes $r"
grep -qaP '\x1b\[31m' out.5 && bad "terminal escape printed raw"
"$PY" - >v 2>&1 <<'E' && ok "33 rows each"
import csv,json,glob
j=[json.loads(l) for l in open('p.json',encoding='utf-8',errors='surrogateescape')]; assert len(j)==33,len(j)
for f in ['p.csv',*glob.glob('logs/runs/r/evaluation*/worst.csv')]:
    rows=list(csv.reader(open(f,newline='',encoding='utf-8',errors='surrogateescape'))); w={len(r) for r in rows}
    assert len(w)==1 and (f!='p.csv' or len(rows)==34), f'{f}: {len(rows)-1} rows of widths {w} for 33 images: a name with a carriage return is not quoted'
E
bad "$(tail -1 v)"
