"""A home of an earlier version opens, and its studies resume.

`home-before-0.1.tar.xz` is a backup by commit 597cab3, before the packages moved into the namespace hpsearch. Study
`kept` is finished, with finalists and a registered champion. Study `cut` was interrupted, and names its objective as
`objectives.breast_cancer:BreastCancer`.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hpsearch.storage.embedded.stack import StackInfo, find_running
from tests.e2e.support import Cli
from tests.faults.harness import Zygote

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.xdist_group("backup")]


@pytest.mark.soak  # test_backup.py restores a backup; the formats of an earlier version do not change
def test_a_home_from_before_version_0_1_opens_and_resumes(
    guarded_homes: Callable[[], AbstractContextManager[Path]], zygote: Zygote, tmp_path: Path
) -> None:
    backup = tmp_path / "home.tar"
    backup.write_bytes(lzma.decompress(Path(__file__).with_name("home-before-0.1.tar.xz").read_bytes()))
    with guarded_homes() as home:
        # Commands need the address of services only for their home, until `restore` has started some.
        Cli(StackInfo(home, "", "", "", ""), tmp_path, zygote)("restore", str(backup))
        stack = find_running(home)
        assert stack is not None
        cli = Cli(stack, tmp_path, zygote)

        listed = cli("studies")
        assert re.search(r"cut +breast_cancer +0/4", listed)
        assert "kept@champion (trial 1)" in listed
        shown = cli("show", "cut")
        assert "a free worker resumes the trial next" in shown
        assert "sampler tpe" in shown, "not the default of this version"
        before = epochs(cli)
        assert [len(trial) for trial in before] == [9, 1, 1, 1]

        trained = re.findall(r"INFO epoch \d+ ", cli("worker", "--study", "cut"))
        after = epochs(cli)
        assert len(after[0]) == 100
        assert all(old.items() <= new.items() for old, new in zip(before, after, strict=True))
        assert len(trained) == sum(map(len, after)) - sum(map(len, before)), "no epoch was trained twice"
        assert re.search(r"cut +breast_cancer +4/4", cli("studies"))
        assert "score reproduced in a process without the code of hpsearch and the objective" in cli(
            "serve-check", "kept@champion"
        )


def epochs(cli: Cli) -> list[dict[int, float]]:
    """The values that each trial of `cut` reported."""
    return [trial.intermediate_values for trial in cli.study("cut").trials]
