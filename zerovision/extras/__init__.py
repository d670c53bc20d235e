"""What comes beside training: audits of data, sweeps, a page that serves a model, replay and bisection of runs."""
