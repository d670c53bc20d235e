"""Tools around training: data audits, sweeps, a web page for a model, and replay and bisection of runs."""
