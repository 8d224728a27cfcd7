"""Privileges of the shared roles of workers in databases of other owners."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

# Earlier versions of `hpsearch migrate` granted these roles, which all databases of a server share, access to every
# database. So the workers of one team had access to the database of another one.
_GRANTEES = sa.text("""
    SELECT DISTINCT rolname
      FROM pg_class c CROSS JOIN aclexplode(c.relacl) JOIN pg_roles ON pg_roles.oid = grantee CROSS JOIN pg_database
     WHERE c.oid = 'studies'::regclass::oid AND datname = current_database()
       AND rolname IN ('hpsearch_worker', 'hpsearch_access') AND grantee <> c.relowner
       AND 'hpsearch_owner' NOT IN (current_user, pg_get_userbyid(datdba))
""")
_REVOKE = """
    REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role};
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {role};
    ALTER DEFAULT PRIVILEGES IN SCHEMA public REVOKE ALL ON TABLES FROM {role};
    ALTER DEFAULT PRIVILEGES IN SCHEMA public REVOKE ALL ON SEQUENCES FROM {role};
    REVOKE ALL ON SCHEMA public FROM {role};
"""


def upgrade() -> None:
    """Revoke the privileges unless `hpsearch_owner` owns the database or runs the migration."""
    for role in op.get_bind().scalars(_GRANTEES).all():
        op.execute(_REVOKE.format(role=role))


def downgrade() -> None:
    """Change nothing: the earlier version grants the privileges in its next migration."""
