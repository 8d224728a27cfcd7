"""The Python API: a study as an object, for notebooks and programs. The command line is a thin layer over this API."""
