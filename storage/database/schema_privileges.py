"""Users who may create objects in the schema of the tables, and the objects of other users that run their code.

Postgres prefers an operator of the schema that fits the types exactly to one of its own. So a user who creates one
there can run code as each user who works with the tables, also as the owner (CVE-2018-1058). So can the owner of a
table that hpsearch uses, by a trigger, and the owner of a type, by a cast. A user who may create schemas could create
one with the name of the owner, which is the first of the default search path.
"""

from __future__ import annotations

from typing import Any

from hpsearch.short_lists import join_first
from hpsearch.storage.database.schema import OPTUNA_TABLES, OPTUNA_TYPES, OWN_TABLES, REVISION_TABLES, STUDY_IDS_TABLE

_SHOWN_OBJECTS = 5
_EVERYONE = "PUBLIC"
# A table has a type of its name.
_USED_NAMES = {*OPTUNA_TABLES, *OPTUNA_TYPES, *OWN_TABLES, *REVISION_TABLES, STUDY_IDS_TABLE}


def revoke_create_privileges(cursor: Any) -> tuple[list[str], list[str]]:
    """Revoke CREATE on the schema from all roles except the owners, if the current user has the permission.

    The transaction must end afterwards: its search path lacks the schema.

    Returns:
        Errors and warnings, each with the remedy. Errors are schemas, functions, operators, types, and tables with the
        names of hpsearch's tables, of other users in the search path, and users who may still create in the schema:
        further statements may run their code. Warnings are withdrawn privileges, users who may create in the database,
        and other tables of other users.
    """
    cursor.execute("SELECT current_schemas(false)::text[]")
    (schemas,) = cursor.fetchone()
    cursor.execute("SHOW search_path")
    (path,) = cursor.fetchone()
    cursor.execute("SET LOCAL search_path = pg_catalog")  # so that these queries use no operators of other users
    warnings = []
    errors = _describe_foreign_objects(_find_foreign_schemas(cursor, schemas))
    if not errors:
        _fix_search_path(cursor, path, schemas)
    warnings += _find_creators_of_schemas(cursor)
    for schema, grantee, owners, can_revoke in _find_creators(cursor, schemas):
        statement = f"REVOKE CREATE ON SCHEMA {schema} FROM {grantee}; GRANT ALL ON SCHEMA {schema} TO {owners}"
        if can_revoke and grantee == _EVERYONE:
            cursor.execute(statement)
            warnings.append(
                f"the permission of all users to create in the schema {schema} is withdrawn; if other programs have "
                "tables there, move these to a schema of their own"
            )
        else:
            errors.append(
                f"{'all users' if grantee == _EVERYONE else f'the role {grantee}'} may create functions in the schema "
                f"{schema}, which could run as the owner of the tables; run as "
                f"{'the owner of the schema' if can_revoke else 'a superuser'}: {statement}; or keep the tables in a "
                "schema of their own, which the search_path of their owner and workers names"
            )
    tables = _find_foreign_objects(cursor, schemas, _TABLES)
    used = {name: description for name, description in tables.items() if name in _USED_NAMES}
    errors += _describe_foreign_objects([*_find_foreign_objects(cursor, schemas, _CODE).values(), *used.values()])
    if others := [description for name, description in tables.items() if name not in used]:
        warnings.append(
            f"other users own tables in the schema of the studies: {join_first(others, _SHOWN_OBJECTS)}; "
            "check their triggers"
        )
    return errors, warnings


def find_foreign_code(cursor: Any) -> list[str]:
    """Return an error, with the remedy, if other users own objects in the schema of an empty database; change nothing.

    The transaction must end afterwards: its search path lacks the schema.
    """
    cursor.execute("SELECT current_schemas(false)::text[]")
    (schemas,) = cursor.fetchone()
    cursor.execute("SET LOCAL search_path = pg_catalog")
    found = _find_foreign_objects(cursor, schemas, f"{_CODE} UNION ALL {_TABLES}")
    return _describe_foreign_objects([*_find_foreign_schemas(cursor, schemas), *found.values()])


def find_transactions_of_others(cursor: Any) -> set[str]:
    """Return descriptions of the open transactions of other users in the database, except those of superusers.

    A transaction has the same description in each call. The transaction of the cursor must end afterwards: its search
    path lacks the schema.
    """
    cursor.execute("SET LOCAL search_path = pg_catalog")
    cursor.execute(
        """
        SELECT format('transaction %s of process %s of %s', virtualtransaction, a.pid, rolname)
          FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid JOIN pg_roles r ON r.oid = usesysid
         WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND datname = current_database()
           AND rolname <> current_user AND NOT rolsuper
         UNION ALL
        SELECT format('prepared transaction %L of %s', gid, owner)
          FROM pg_prepared_xacts JOIN pg_roles ON rolname = owner
         WHERE database = current_database() AND owner <> current_user AND NOT rolsuper
        """
    )
    return {description for (description,) in cursor.fetchall()}


def _fix_search_path(cursor: Any, path: str, schemas: list[str]) -> None:
    """Store the current schemas as the user's search path in this database, instead of `$user`.

    A path that the user has chosen stays. After SET ROLE, Postgres reads the settings of the login role, which the
    current user may not be allowed to change.
    """
    from psycopg2 import sql

    cursor.execute("SELECT current_database(), session_user = current_user")
    database, is_login = cursor.fetchone()
    if '"$user"' in path and schemas and is_login:
        names = sql.SQL(", ").join(map(sql.Identifier, schemas))
        statement = sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {} SET search_path = {}")
        cursor.execute(statement.format(sql.Identifier(database), names))


def _describe_foreign_objects(objects: list[str]) -> list[str]:
    if not objects:
        return []
    return [
        f"other users own objects in the search path of the tables, whose code could run as the owner: "
        f"{join_first(objects, _SHOWN_OBJECTS)}; if one of these users owns your studies, connect as this user (for a "
        "group: ?options=-c%20role%3DGROUP); otherwise drop the objects or move them to another schema, as a superuser "
        "or as their owner"
    ]


def _find_creators(cursor: Any, schemas: list[str]) -> list[tuple[str, str, str, bool]]:
    """Return the users that may create in a schema, without its owners and superusers.

    Returns:
        For each of them the schema, the user, those who need the privilege (the current user, and the owners of the
        database and of the tables), and whether the current user can revoke it.
    """
    cursor.execute(
        f"""
        SELECT quote_ident(nspname), CASE grantee WHEN 0::oid THEN '{_EVERYONE}' ELSE grantee::regrole::text END,
               (SELECT string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FROM pg_roles WHERE oid = ANY(owners)),
               pg_has_role(nspowner, 'USAGE')
          FROM pg_namespace n CROSS JOIN aclexplode(coalesce(nspacl, acldefault('n', nspowner)))
         CROSS JOIN pg_database d
         CROSS JOIN LATERAL (SELECT ARRAY[datdba, (SELECT oid FROM pg_roles WHERE rolname = current_user),
                                          (SELECT relowner FROM pg_class
                                            WHERE relname = 'studies' AND relnamespace = n.oid)] AS owners) o
         WHERE nspname = ANY(%s) AND datname = current_database() AND privilege_type = 'CREATE'
           AND NOT coalesce(grantee = ANY(array_remove(owners || nspowner, NULL)), false)
           AND NOT EXISTS (SELECT FROM pg_roles WHERE oid = grantee AND rolsuper)
        """,  # noqa: S608 the part is a constant
        (schemas,),
    )
    return [tuple(row) for row in cursor.fetchall()]


def _find_creators_of_schemas(cursor: Any) -> list[str]:
    """Return warnings, with the remedy, about other users who may create schemas in the database."""
    cursor.execute(
        """
        SELECT quote_ident(datname), CASE grantee WHEN 0::oid THEN 'PUBLIC' ELSE grantee::regrole::text END
          FROM pg_database CROSS JOIN aclexplode(datacl)
         WHERE datname = current_database() AND privilege_type = 'CREATE' AND grantee <> datdba
           AND NOT EXISTS (SELECT FROM pg_roles
                            WHERE oid = grantee AND (rolsuper OR rolname = current_user))
        """
    )
    return [
        f"{'all users' if grantee == _EVERYONE else f'the role {grantee}'} may create schemas and extensions in the "
        f"database; run as its owner: REVOKE CREATE ON DATABASE {database} FROM {grantee}"
        for database, grantee in cursor.fetchall()
    ]


# Kind and name, owner, schema, and a key of each object.
_CODE = """
    SELECT 'function ' || oid::regprocedure::text, proowner, pronamespace, oid::regprocedure::text FROM pg_proc
    UNION ALL
    SELECT 'operator ' || oid::regoperator::text, oprowner, oprnamespace, oid::regoperator::text FROM pg_operator
    UNION ALL
    SELECT 'type ' || oid::regtype::text, typowner, typnamespace, oid::regtype::text
      FROM pg_type WHERE typtype IN ('b', 'd', 'e', 'm', 'r') AND typelem = 0::oid
    UNION ALL
    SELECT 'type ' || oid::regclass::text, relowner, relnamespace, oid::regclass::text FROM pg_class WHERE relkind = 'c'
"""
_TABLES = """
    SELECT 'table ' || oid::regclass::text, relowner, relnamespace, relname::text
      FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'm', 'f')
"""


def _find_foreign_objects(cursor: Any, schemas: list[str], objects: str) -> dict[str, str]:
    """Return the objects of users who are not the current user, the database's owner or superusers.

    Returns:
        A description of each object, by a key, which is the name of a table.

    A role of which the current user is a member counts as another user: up to Postgres 14, each login may make others
    its members, and the workers' group may have the owner as a member.
    """
    cursor.execute(
        f"""
        SELECT key, object || ' of ' || quote_ident(rolname)
          FROM ({objects}) AS o (object, owner, namespace, key)
          JOIN pg_namespace n ON n.oid = namespace
          JOIN pg_roles r ON r.oid = owner
         WHERE nspname = ANY(%s) AND NOT rolsuper AND rolname <> current_user
           AND owner <> (SELECT datdba FROM pg_database WHERE datname = current_database())
         ORDER BY 2
        """,  # noqa: S608 the parts are constants
        (schemas,),
    )
    return dict(cursor.fetchall())


def _find_foreign_schemas(cursor: Any, schemas: list[str]) -> list[str]:
    """Return the schema with the name of the current user if it belongs to another user."""
    statement = "SELECT 'schema ' || oid::regnamespace::text, nspowner, oid, nspname::text FROM pg_namespace"
    return list(_find_foreign_objects(cursor, schemas, f"{statement} WHERE nspname = current_user").values())
