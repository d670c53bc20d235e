#!/usr/bin/env bash
# datasets' own writer keeps the base name alone, so Parquet files have one path for many images: each row is an image of its own; right: an equal path is no group
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E' || { [ $? = 77 ] && exit 0; bad "the input could not be made"; }
from lib import *
parquet("q/data.parquet", [pic(i // 12) for i in range(24)], [i // 12 for i in range(24)], paths=["image.jpg"] * 24, names=["ant", "bee"])
E
doc "doctor --check-data q"
rc=$(cat rc.1); [ "$rc" = 0 ] && says 1 'of 24 images' || bad "12 images of each of 2 classes, all named image.jpg: $(tail -1 out.1)"
ok "$(tail -1 list)"
