"""The Python API: a study as an object, for notebooks and programs; the command line is a thin layer over it."""
