"""MLflow: the outbox on disk, what sends it in the background, and the registry of models.

Imports: errors, files, attributes, database, trials.
"""
