"""The spec of a study: every setting, validated, from flags or a file."""
