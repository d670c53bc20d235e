"""Finds out what is wrong with machines, data and network before a run starts.

`collect` starts `scripts/doctor.py --probe` on every machine and asks for facts and measurements (`probe`, answered by
`host_facts`, `workload`, `network`, `tcp_paths`). `assess` turns them into rows of the `table`.
"""
