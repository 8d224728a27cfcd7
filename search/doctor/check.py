"""A check: a name, how to look, what it needs; and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hpsearch.search.errors import USER_ERRORS
from hpsearch.storage.urls import without_secret

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Found:
    """What a look came to: the status, what was found, and what to do where that does not say it already."""

    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Found:
    """Nothing is to be done."""
    return Found("ok", found)


def warning(found: str, remedy: str) -> Found:
    """A worker can work, with a drawback."""
    return Found("warning", found, remedy)


def failed(found: str, remedy: str) -> Found:
    """A worker cannot work here, or loses something."""
    return Found("failed", found, remedy)


@dataclass(frozen=True)
class Check:
    """One thing that is looked at.

    Attributes:
        name: in one word.
        look: finds out; what it raises is a failure.
        needs: the names of earlier checks without which there is nothing to look at.
    """

    name: str
    look: Callable[[], Found]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a check came to, by its name."""

    check: str
    status: Status
    found: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return asdict(self)


class Checker:
    """Does checks one after the other, and remembers what cannot be looked at for want of another.

    Args:
        secrets: URLs whose passwords no finding may show.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._lacking: dict[str, str] = {}  # a check that did not come to anything: the one that was to blame

    def run(self, checks: Iterable[Check]) -> Iterator[Finding]:
        """Yield what each check came to as soon as it is known."""
        for check in checks:
            blamed = next((self._lacking[need] for need in check.needs if need in self._lacking), None)
            found = self._look(check) if blamed is None else Found("skipped", f"needs {blamed}")
            if found.status in {"failed", "skipped"}:
                self._lacking[check.name] = blamed or check.name
            yield Finding(check.name, found.status, found.found, found.remedy)

    def lacks(self, name: str) -> bool:
        """Whether a check has failed or was skipped."""
        return name in self._lacking

    def _look(self, check: Check) -> Found:
        try:
            return check.look()
        except USER_ERRORS as error:  # says itself what to do
            return failed(str(error), "")
        except Exception as error:  # whatever it is, the other checks go on
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            for url in self._secrets:
                said = without_secret(said, url)
            return failed(said, "")
