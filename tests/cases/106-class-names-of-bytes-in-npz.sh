#!/usr/bin/env bash
# own (arrays of NumPy's type S, as h5py writes names): class_names of bytes are the names, not "b'cat'"
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
"$PY" - <<'E'
import numpy as np
y = np.arange(30) % 2; x = np.random.default_rng(0).integers(0, 255, (30, 32, 32, 3), dtype="uint8")
np.savez("a.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], class_names=np.array([b"cat", b"dog"]))
E
doc "doctor --check-data npz:a.npz"; one_line 1 || { ! says 1 "b'cat'" && says 1 '\bcat\b'; } || bad "the classes are $(grep -aoE "b'[a-z]*'" out.1 | tr '\n' ' ')"; ok "$(tail -1 list)"
