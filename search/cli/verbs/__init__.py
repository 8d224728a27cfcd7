"""The verbs of the command line: a file for each, with a `register`; one that is put here is found."""
