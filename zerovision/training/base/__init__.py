"""The basics that all other folders may import: errors, files, settings, units, and messages about a run."""
