"""The built-in objectives, each on data that needs no download."""
