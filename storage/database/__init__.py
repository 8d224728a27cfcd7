"""The database: connections, retries, locks, migrations and roles."""
