"""Finds out what is wrong with machines, data and network before a run starts.

`examination` starts `scripts/doctor.py --probe` on every machine (`probe`), asks it for what `machine`, `gpu_health`,
`paths` and `network` find there, and turns the answers into rows of the `table`.
"""
