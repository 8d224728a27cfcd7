"""The database: how it is reached, retried, locked, migrated, and who may do what in it."""
