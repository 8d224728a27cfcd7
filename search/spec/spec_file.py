"""Read the settings of a study from a TOML or YAML file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.resolve import convert_names_to_tables

_MAX_BYTES = 1_000_000  # the parsers need a minute for more


def check_regular(path: Path, setting: str) -> None:
    """Check that a path is not a pipe or a device, from which a read may never end.

    Raises:
        SearchError: the path exists, and is not a regular file.
        OSError: the path cannot be accessed.
    """
    if path.exists() and not path.is_file():
        raise SearchError(f"{setting} {path} is not a regular file; give the path of a file")


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, of which others silently keep the last, and aliases.

    A few nested aliases can describe a value that is too large for the memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs have no types for it
            message = f"the alias '*{alias.anchor}' is not supported; write its value again"
            raise yaml.composer.ComposerError(None, None, message, alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep=deep)


def read_spec_file(path: Path) -> dict[str, Any]:
    """Return the settings in a ``.toml``, ``.yaml`` or ``.yml`` file as JSON types.

    Raises:
        SearchError: the file is missing, has another extension, cannot be parsed, or does not contain a table.
    """
    suffix = path.suffix.lower()
    if suffix not in {".toml", ".yaml", ".yml"}:
        raise SearchError(f"--spec {path}: unknown file type {suffix!r}; use .toml, .yaml or .yml")
    try:
        check_regular(path, "--spec")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise SearchError(f"--spec {path} has {size} bytes; a file of settings has at most {_MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows add a byte order mark
        is_toml = suffix == ".toml"
        values = tomllib.loads(text) if is_toml else yaml.load(text, Loader=_Loader)  # noqa: S506 derived from SafeLoader
    except OSError as error:
        raise SearchError(f"--spec {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SearchError(f"--spec {path} is not UTF-8 text; save the file as UTF-8") from None
    except RecursionError:
        raise SearchError(f"--spec {path}: the brackets are nested too deeply; write a table of settings") from None
    except yaml.MarkedYAMLError as error:
        at = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SearchError(f"--spec {path}: {error.problem or error.context}{at}; correct the file") from None
    except (KeyError, IndexError, AttributeError, TypeError):  # of PyYAML, for a value after a tag such as !!int
        raise SearchError(f"--spec {path}: a value does not match its YAML tag; remove the tag") from None
    except (ValueError, yaml.YAMLError) as error:  # ValueError: TOML, or a number or date that Python cannot hold
        detail = re.sub(
            "Cannot (overwrite a value|declare .* twice)", "a key appears twice", " ".join(str(error).split())
        )
        raise SearchError(f"--spec {path}: {detail}") from None
    if values is None:
        raise SearchError(f"--spec {path} is empty; write settings such as 'n_trials: 20'")
    if not isinstance(values, dict):
        raise SearchError(f"--spec {path} must contain settings such as 'n_trials', not {type(values).__name__}")
    return convert_names_to_tables(values)
