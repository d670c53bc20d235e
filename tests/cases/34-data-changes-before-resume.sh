#!/usr/bin/env bash
# own: between stop and resume an image is added, one is replaced, a class renamed, the data folder moved
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
mk d a b; many "train --data d --run-name r --epochs 2"; [ "$(cat rc.1)" = 0 ] || bad "$(tail -1 out.1)"
go() { rm -rf logs2; cp -r logs logs2; many "train --data $1 --log-dir logs2 --run-name r --epochs 3 --resume auto" >/dev/null; rc=$(cat rc.1); tbs; echo "$2: exit $rc: $(grep -i 'note\|error\|warn\|changed\|differ' out.1 | head -2 | tr '\n' '|' | cut -c1-400)"; }
cp -r d d2; cp d/a/0.png d2/a/new.png; go d2 "moved copy with one image more" >l; cp -r d e1; rm e1/a/0.png; go e1 "one image less" >>l
cp -r d e2; mv e2/b e2/z; go e2 "class renamed" >>l; mv d e3; go e3 "data moved only" >>l; mv e3 d; mkdir d/c; cp d/a/* d/c; go d "class added" >>l; rm -r d/c; cp d/b/0.png d/a/0.png; go d "image content replaced" >>l; cat l
grep -q 'class renamed: exit 2' l && grep -q 'class added: exit 2' l && ! grep 'image more\|image less\|replaced' l | grep -q 'exit 0: $' && ! grep -q "was made with another data set: '[0-9a-f]*'" l && ok "refused or told: $(cut -d: -f1-2 l | tr '\n' ';')"; rc=2; grep -q "another data set: '[0-9a-f]*'" l && bad "one image more, less or replaced: refused with two 64-digit hashes, no count, no cure: $(grep -o 'was made.*' l | head -1 | cut -c1-120)"; bad "$(grep 'exit 0: $' l | cut -c1-200 | tr '\n' ';')"
