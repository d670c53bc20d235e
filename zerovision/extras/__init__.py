"""Tools around training: data audits, sweeps, a page that serves a model, replay and bisection of runs."""
