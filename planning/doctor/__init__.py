"""Says what is wrong with machines, data and network before a run starts.

Every machine runs `scripts/doctor.py --probe` and answers questions (`probe`) with facts only. What they mean is judged
in one place, by functions from facts to rows (`machine`, `hosts`, `data`, `network`), which `examination` lists.
"""
