#!/usr/bin/env bash
# vision#2831, vision#4925: @eaDir, __MACOSX, #recycle, lost+found become classes or images
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
wrong=""
mk d a b; cp -r d base; mk d 'a/@eaDir/0.png' 'b/@eaDir/0.png'
train --data base --run-name b; nb=$(grep -o '[0-9]* training and [0-9]* validation' out)
train --data d --run-name r; n=$(grep -o '[0-9]* training and [0-9]* validation' out); echo "@eaDir: $rc: $n (without: $nb)"; [ "$n" = "$nb" ] || wrong="$wrong @eaDir($n,not $nb)"
for s in __MACOSX '#recycle' '$RECYCLE.BIN' 'lost+found' 'System Volume Information' .ipynb_checkpoints .DS_Store.d __pycache__ '@Recycle'; do
  rm -rf e; cp -r base e; mkdir -p "e/$s"; case $s in lost*|Sys*|__pyc*) ;; *) mkdir -p "e/$s/a"; : >"e/$s/a/._0.png"; cp base/a/0.png "e/$s/a/x.png";; esac
  train --data e --run-name "r$RANDOM"; c=$(grep -o '[0-9]* classes' out); echo "$s: $rc $c $(tail -1 out | cut -c1-200)"
  [ "$rc $c" = "0 2 classes" ] || wrong="$wrong $s(exit $rc,$c)"
done
[ -z "$wrong" ] && ok "system folders are passed over" || bad "$wrong"
