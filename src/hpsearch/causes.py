"""The causes of an error."""

from __future__ import annotations

from collections.abc import Iterator


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes, each once: `raise error from error` makes a cycle."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
