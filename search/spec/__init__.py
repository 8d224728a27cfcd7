"""The spec of a study: all its settings, validated, from flags or a spec file."""
