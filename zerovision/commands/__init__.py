"""The entries that a person types, as scripts of a checkout and as verbs of `zerovision`."""
