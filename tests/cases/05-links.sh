#!/usr/bin/env bash
# datasets#6853, #6764; timm#334, vision#1580: a subset of links to files elsewhere; label = folder of the link
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
wrong=""; mk pool x y
mkdir -p d/a d/b; for i in 0 1 2 3 4 5 6 7; do ln -s "$W/pool/x/$i.png" d/a/; ln -s "$W/pool/y/$i.png" d/b/; done
train --data d --run-name r1; echo "links to files: $rc $(tail -1 out | cut -c1-200)"; [ $rc = 0 ] || wrong="$wrong links-to-files"
mkdir -p snap/blobs snap/snapshots/1/a snap/snapshots/1/b; for c in a b; do for i in 0 1 2 3 4 5; do k=$c$i; cp pool/$([ $c = a ] && echo x || echo y)/$i.png snap/blobs/$k; ln -s ../../../blobs/$k snap/snapshots/1/$c/$i.png; done; done
train --data snap/snapshots/1 --run-name r2; echo "hub cache: $rc $(tail -1 out | cut -c1-200)"; [ $rc = 0 ] || wrong="$wrong hub-cache"
mkdir e; ln -s ../pool/x e/a; ln -s ../pool/y e/b
train --data e --run-name r3; echo "class folders are links: $rc $(tail -1 out | cut -c1-200)"; [ $rc = 0 ] || wrong="$wrong class-folder-links"
ln -s "$W/pool" whole; train --data whole --run-name r4; echo "the folder is a link: $rc"; [ $rc = 0 ] || wrong="$wrong root-link"
cp -r pool f; ln -s nowhere.png f/x/broken.png; train --data f --run-name r5; echo "one broken link: $rc $(tail -1 out | cut -c1-200)"; tb; [ $rc = 2 ] && grep -q broken out || [ $rc = 0 ] || wrong="$wrong broken"
cp -r pool g; ln -s .. g/x/loop; train --data g --run-name r6; echo "loop: $rc $(tail -1 out | cut -c1-200)"; tb; [ $rc = 2 ] || [ $rc = 0 ] || wrong="$wrong loop"
ln -s l2 g/l1; ln -s l1 g/l2; rm g/x/loop; train --data g --run-name r7; echo "ELOOP: $rc $(tail -1 out | cut -c1-200)"; tb
tool doctor --check-data d; echo "doctor: $rc $(last)"
tool predict logs/runs/r5 d 2>/dev/null; 
[ -z "$wrong" ] && ok "links are followed" || bad "refused:$wrong"
