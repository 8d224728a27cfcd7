"""The two databases and the roles of a deployment.

| role | owns | permissions |
|---|---|---|
| `hpsearch_owner` | database `optuna` | change the schema: `hpsearch migrate` |
| `hpsearch_worker` | nothing | read and write rows in `optuna` |
| `hpsearch_access` | nothing | the same, as a group of further logins; it is no login itself |
| `mlflow` | database `mlflow` | everything there; only the MLflow server has its password |

Postgres lets each login role change its own password and settings, and end its own sessions. So users that share the
login `hpsearch_worker` trust each other. A separate login is safe from the others:
``CREATE ROLE ann LOGIN PASSWORD '...' IN ROLE hpsearch_access``.

All databases of a server share its roles. So the database of another team needs an owner and roles of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpsearch.storage.database.connect import open_cursor
from hpsearch.storage.database.schema import OPTUNA_VERSION_TABLE, REVISION_TABLES, STUDY_IDS_TABLE
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.urls import DRIVER, normalise_url

OWNER = "hpsearch_owner"
WORKER = "hpsearch_worker"
ACCESS = "hpsearch_access"
MLFLOW = "mlflow"
STUDY_DATABASE = "optuna"
MLFLOW_DATABASE = "mlflow"

# Two 32-bit keys, distinct from those of hpsearch.storage.database.locks.
_LOCK = (0x68700004, 1)

# Server side of the detection of dead workers: the server releases their locks after about 35 s.
_KEEPALIVES = {"tcp_keepalives_idle": "20", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}


@dataclass(frozen=True)
class Databases:
    """Database URLs, one per role, with the password of the role."""

    owner_url: str = field(repr=False)
    worker_url: str = field(repr=False)
    mlflow_url: str = field(repr=False)


def create_databases(
    admin_url: str,
    *,
    owner_password: str,
    worker_password: str,
    mlflow_password: str,
    setting: str = "HPSEARCH_ADMIN_URL",
) -> Databases:
    """Create missing databases and roles, set the passwords, and remove other settings of the login roles.

    Idempotent, and safe with concurrent calls. The URL must lead to the server itself, not to a pooler.

    Args:
        admin_url: URL of any database of the server, for a superuser or a role with CREATEROLE and CREATEDB.
        owner_password: password of `hpsearch_owner`.
        worker_password: password of `hpsearch_worker`.
        mlflow_password: password of `mlflow`.
        setting: name of the setting that contains `admin_url`, for messages.

    Returns:
        URLs of the new or existing databases on this server.

    Raises:
        StorageError: the server cannot be reached, or the admin lacks privileges.
    """
    import psycopg2

    admin_url = normalise_url(admin_url, setting=setting)
    passwords = {OWNER: owner_password, WORKER: worker_password, MLFLOW: mlflow_password}
    urls = {
        role: _make_role_url(admin_url, role, password, MLFLOW_DATABASE if role == MLFLOW else STUDY_DATABASE)
        for role, password in passwords.items()
    }
    try:
        # CREATE DATABASE cannot run in a transaction, so this is a session lock.
        with _open_admin_cursor(admin_url, setting, autocommit=True) as admin:
            admin.execute("SELECT pg_advisory_lock(%s, %s)", _LOCK)
            for role, password in passwords.items():
                _create_role(admin, role, password)
            admin.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (ACCESS,))
            if admin.fetchone() is None:
                admin.execute(f"CREATE ROLE {ACCESS} NOLOGIN")
            for database, owner in ((STUDY_DATABASE, OWNER), (MLFLOW_DATABASE, MLFLOW)):
                _create_database(admin, database, owner)
                _reset_settings(admin, database, passwords)
                _grant_schema(admin_url, database, owner, setting)
                _restrict_connect(urls[owner], database, setting)
    except psycopg2.Error as error:
        raise StorageError(
            f"{setting}: cannot create the databases and roles ({format_error(error)}); "
            "give the URL of a superuser, or of a role with CREATEROLE and CREATEDB"
        ) from None
    return Databases(owner_url=urls[OWNER], worker_url=urls[WORKER], mlflow_url=urls[MLFLOW])


def grant_workers(cursor: Any, named: Collection[str] = ()) -> None:
    """Grant roles of workers read and write access to the tables of the connected owner, future tables included.

    Workers can only read the tables with the revisions of the schema and with the ids of studies. Where one user is
    both owner and worker, no role needs a grant.

    Args:
        cursor: cursor of the owner, in the database.
        named: further roles. `hpsearch_worker` and `hpsearch_access` get access only to the tables and databases of
            `hpsearch_owner`, because all databases of a server share these two roles.

    Raises:
        StorageError: a named role does not exist.
    """
    from psycopg2 import sql

    cursor.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", (list(named),))
    if missing := sorted(set(named) - {role for (role,) in cursor.fetchall()}):
        raise StorageError(f"--worker-role {missing[0]}: the server has no such role; create it with CREATE ROLE")
    cursor.execute(
        """
        SELECT rolname, rolname = ANY(%(named)s) AND pg_has_role(datdba, 'USAGE'), datname, nspname
          FROM pg_roles CROSS JOIN pg_database CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = relnamespace
         WHERE datname = current_database() AND rolname <> current_user AND c.oid = 'studies'::regclass::oid
           AND (rolname = ANY(%(named)s)
                OR rolname = ANY(%(shared)s) AND %(owner)s IN (current_user, pg_get_userbyid(datdba)))
        """,
        {"named": list(named), "shared": [WORKER, ACCESS], "owner": OWNER},
    )
    for role, can_grant_connect, database, schema in cursor.fetchall():
        names = {
            name: sql.Identifier(value) for name, value in (("role", role), ("database", database), ("schema", schema))
        }
        cursor.execute(sql.SQL(_GRANT).format(**names))
        if can_grant_connect:
            cursor.execute(sql.SQL("GRANT CONNECT ON DATABASE {database} TO {role}").format(**names))
    protect_owner_tables(cursor)


_GRANT = """
    GRANT USAGE ON SCHEMA {schema} TO {role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
    GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
    ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {role};
    ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT USAGE, SELECT, UPDATE ON SEQUENCES TO {role};
"""


def protect_owner_tables(cursor: Any) -> None:
    """Let only the owner change the revisions and the ids of studies, which earlier revisions do not have.

    New tables have the default privileges of the roles of earlier calls.
    """
    cursor.execute(
        """
        SELECT DISTINCT c.oid::regclass::text, CASE grantee WHEN 0::oid THEN 'PUBLIC' ELSE grantee::regrole::text END
          FROM pg_class c CROSS JOIN aclexplode(c.relacl)
         WHERE c.oid IN (SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name)
           AND pg_has_role(c.relowner, 'USAGE') AND grantee <> c.relowner
           AND privilege_type IN ('INSERT', 'UPDATE', 'DELETE')
        """,
        ([*REVISION_TABLES, OPTUNA_VERSION_TABLE, STUDY_IDS_TABLE],),
    )
    for table, grantee in cursor.fetchall():
        cursor.execute(f"REVOKE INSERT, UPDATE, DELETE ON {table} FROM {grantee}")


def find_shared_grantees(cursor: Any) -> set[str]:
    """Return which of `hpsearch_worker` and `hpsearch_access` have privileges on the owner's tables."""
    cursor.execute(
        """
        SELECT rolname FROM pg_class c CROSS JOIN aclexplode(c.relacl) JOIN pg_roles ON pg_roles.oid = grantee
         WHERE c.oid = to_regclass('studies')::oid AND rolname = ANY(%s) AND grantee <> c.relowner
        """,
        ([WORKER, ACCESS],),
    )
    return {role for (role,) in cursor.fetchall()}


def warn_if_public_can_connect(cursor: Any) -> list[str]:
    """Return a warning, with the remedy, if PUBLIC may connect to a database with worker roles."""
    cursor.execute(
        """
        SELECT quote_ident(datname::text), string_agg(DISTINCT w.grantee::regrole::text, ', ')
          FROM pg_database CROSS JOIN aclexplode(coalesce(datacl, acldefault('d', datdba))) a
         CROSS JOIN pg_class c CROSS JOIN aclexplode(c.relacl) w
         WHERE datname = current_database() AND a.grantee = 0::oid AND a.privilege_type = 'CONNECT'
           AND c.oid = 'studies'::regclass::oid AND w.grantee <> c.relowner AND w.grantee <> 0::oid
         GROUP BY datname
        """
    )
    return [
        f"each role of the server may connect to the database {name}; to permit only its workers, run as its owner: "
        f"GRANT CONNECT ON DATABASE {name} TO {workers}; REVOKE CONNECT, TEMPORARY ON DATABASE {name} FROM PUBLIC"
        for name, workers in cursor.fetchall()
    ]


@contextmanager
def _open_admin_cursor(url: str, setting: str, *, autocommit: bool = False) -> Iterator[Any]:
    """Yield a cursor that resolves names only in `pg_catalog`, so no function of another user runs as the admin."""
    with open_cursor(url, application_name="hpsearch-bootstrap", setting=setting, autocommit=autocommit) as cursor:
        cursor.execute("SET search_path = pg_catalog")
        yield cursor


def _make_role_url(admin_url: str, role: str, password: str, database: str) -> str:
    from sqlalchemy.engine import make_url

    url = make_url(admin_url).set(drivername=DRIVER, username=role, password=password, database=database)
    return url.render_as_string(hide_password=False)


def _create_role(admin: Any, role: str, password: str) -> None:
    from psycopg2 import sql
    from psycopg2.extensions import encrypt_password

    # Send the verifier instead of the password, because the server may log the statement.
    verifier = encrypt_password(password, role, scope=admin.connection, algorithm="scram-sha-256")
    name = sql.Identifier(role)
    admin.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,))
    if admin.fetchone() is None:
        admin.execute(sql.SQL("CREATE ROLE {}").format(name))
    admin.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(name, sql.Literal(verifier)))
    admin.execute(sql.SQL("ALTER ROLE {} RESET ALL").format(name))
    for setting, value in _KEEPALIVES.items():
        admin.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(name, sql.Identifier(setting), sql.Literal(value)))


def _create_database(admin: Any, database: str, owner: str) -> None:
    from psycopg2 import sql

    admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", (database,))
    if admin.fetchone() is not None:
        return
    admin.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    if admin.fetchone() != (True,):  # a database can only be assigned to a role of which the admin is a member
        admin.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(sql.Identifier(owner)))
    # Other users may have created functions in template1.
    statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0")
    admin.execute(statement.format(sql.Identifier(database), sql.Identifier(owner)))


def _reset_settings(admin: Any, database: str, roles: Iterable[str]) -> None:
    """Remove the settings of these roles in a database, because each role can change its own settings."""
    from psycopg2 import sql

    for role in roles:
        statement = sql.SQL("ALTER ROLE {} IN DATABASE {} RESET ALL")
        admin.execute(statement.format(sql.Identifier(role), sql.Identifier(database)))


def _grant_schema(admin_url: str, database: str, owner: str, setting: str) -> None:
    """Give the owner role all privileges on the schema `public`, and withdraw the privilege to create from other users.

    Every user has this privilege before Postgres 15, and in newer servers that were upgraded from these versions. Users
    with this privilege could replace operators that functions of the owner call.
    """
    from psycopg2 import sql
    from sqlalchemy.engine import make_url

    url = make_url(admin_url).set(database=database).render_as_string(hide_password=False)
    with _open_admin_cursor(url, setting) as cursor:
        cursor.execute("SELECT has_schema_privilege('public', 'public', 'CREATE')")
        if not cursor.fetchone()[0]:
            return
        cursor.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        cursor.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(sql.Identifier(owner)))


def _restrict_connect(owner_url: str, database: str, setting: str) -> None:
    """Restrict connections to the owner, and for `optuna` also to workers; tests the owner's password too."""
    from psycopg2 import sql

    name = sql.Identifier(database)
    with open_cursor(owner_url, application_name="hpsearch-bootstrap", setting=setting) as cursor:
        cursor.execute(sql.SQL("REVOKE CONNECT, TEMPORARY ON DATABASE {} FROM PUBLIC").format(name))
        if database == STUDY_DATABASE:
            for role in (WORKER, ACCESS):
                cursor.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(name, sql.Identifier(role)))
