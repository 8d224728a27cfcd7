"""Find words in documentation, docstrings, comments and messages that the language rules of CONTRIBUTING.md exclude.

``./hpsearch lint`` runs it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("*.md", "*.py", "hpsearch", ":!tests/docs/test_prose.py")

_PEOPLE = "users?|people|person|developers?|colleagues?|readers?|anyone|someone|everyone|those"

# Patterns, each with its replacement.
RULES = {
    r"anew": "again, new",
    r"beside": "next to, in addition to",
    r"(but|save) for": "except for",
    r"for ever": "forever, permanently",
    r"midst": "the middle of",
    r"thereof|therein|whence|whither|lest|ere|aught|naught|thus|hence|shall": "a modern word",
    r"whoever|whomever|nobody|no one": "the noun: the process, the worker, no user",
    rf"(?!(?:{_PEOPLE})\b)\w+,? who": "that, which",
    r"(go|goes|went|gone|going) on": "continue",
    r"hears?|told|tells|knows|notices|says": "return, log, send, have, detect",
    r"so (many|much) (?!that)\w+": "a number, or N",
    r"(of|by|from|than|with|to|for|in|on) what": "the noun",
    r"foresee|foresees|foreseen": "predict",
}
_ALL = "|".join(rf"(?P<r{n}>\b(?:{rule})\b)" for n, rule in enumerate(RULES))
_PATTERN = re.compile(_ALL.replace(" ", r"\s+"), re.IGNORECASE)
_CODE = re.compile(r"``.+?``|`[^`]+`|https?://\S+", re.DOTALL)


def find_faults(path: Path) -> Iterator[str]:
    """Yield a line for each fault in the prose of a file."""
    for line, text in read_prose(path):
        prose = _CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text)
        for match in _PATTERN.finditer(prose):
            advice = list(RULES.values())[int(str(match.lastgroup)[1:])]
            at = line + prose.count("\n", 0, match.start())
            yield f"{path.relative_to(ROOT)}:{at}: {' '.join(match[0].split())!r}: write {advice}"


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file for people, each with its first line number."""
    if path.suffix == ".md":
        fenced = re.compile(r"^( *)(```+).*?^\1\2$", re.DOTALL | re.MULTILINE)
        yield 1, fenced.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT or (
                tokenize.tok_name[token.type] in {"STRING", "FSTRING_MIDDLE"} and " " in token.string
            ):
                yield token.start[0], token.string


def main() -> int:
    """Print the faults in the files of the repository; return 1 if there are any."""
    command = ["git", "ls-files", *FILES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    faults = [fault for path in paths if path != Path(__file__) for fault in find_faults(path)]
    sys.stdout.writelines(f"{line}\n" for line in [*faults, f"{len(faults)} faults of language"])
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
