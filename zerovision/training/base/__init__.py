"""What every room may use: errors, files, options, units, and what is said about a run."""
