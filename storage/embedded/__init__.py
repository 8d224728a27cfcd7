"""The embedded stack: a Postgres, an MLflow server and a dashboard of our own on this machine.

Imports: errors, files, home, urls, database.
"""
