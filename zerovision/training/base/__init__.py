"""What every other folder may use: errors, files, options, units, and messages about a run."""
