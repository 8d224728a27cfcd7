"""Custom loops of the documentation on two ranks: a stopped and resumed trial equals an uninterrupted one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from hpsearch import ObjectiveError
from tests.docs.devices import CHANGES, EXAMPLES
from tests.objectives.custom_loop.support import EPOCHS, trained, whole_and_resumed
from tests.objectives.training.ranks.support import on_ranks

_NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None
_WITH_DEEPSPEED = pytest.mark.skipif(_NO_DEEPSPEED, reason="deepspeed is not installed: the extra of this name has it")
_STAGE = '"stage": 2, "offload_optimizer": {"device": "cpu"}'
CASES = {title: text for title, text in EXAMPLES.items() if title != "DeepSpeed"}
_STAGES = {stage: EXAMPLES["DeepSpeed"].replace(_STAGE, f'"stage": {stage}') for stage in (1, 2, 3)}
ZERO = {
    "DeepSpeed ZeRO 2, offloaded": EXAMPLES["DeepSpeed"],
    **{f"DeepSpeed ZeRO {stage}": text for stage, text in _STAGES.items()},
}
assert _STAGE in EXAMPLES["DeepSpeed"]


@pytest.fixture(scope="module")
def imported() -> None:
    """Import slow libraries before processes are forked, instead of in each process."""
    for name in (
        "accelerate",
        "matplotlib.pyplot",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "sklearn.datasets",
    ):
        importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("title", "text"),
    [
        *(pytest.param(*case, marks=[] if case[0] == "FSDP" else pytest.mark.soak) for case in CASES.items()),
        *(pytest.param(*case, marks=_WITH_DEEPSPEED) for case in ZERO.items()),
    ],
    ids=[*CASES, *ZERO],
)
def test_an_example_resumes_on_two_ranks(title: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(text)
    whole, resumed = whole_and_resumed(f"{path}:main", tmp_path)
    assert whole[0] == whole[1]
    assert resumed[0] == resumed[1]
    (status, expected), (_, found) = whole[0], resumed[0]
    assert (status, len(expected), len(found)) == ("completed", EPOCHS, EPOCHS)
    for (_, numbers), (_, others) in zip(expected, found, strict=True):
        assert others == pytest.approx(numbers, abs=1e-6), title
    losses = [numbers["val_loss"] for _, numbers in expected]
    assert losses[-1] < losses[0], "it learnt something"
    assert not (tmp_path / "parts" / "checkpoint").exists()


def _after_a_failure(ranks, failing, whole, folder):
    try:
        trained(ranks, failing, folder / "failing")
    except ObjectiveError as error:
        return str(error), trained(ranks, whole, folder / "whole")[0]


@pytest.mark.slow
@_WITH_DEEPSPEED
def test_deepspeed_trains_after_the_ranks_reconnected(tmp_path: Path) -> None:
    whole, failing = tmp_path / "whole.py", tmp_path / "failing.py"
    whole.write_text(EXAMPLES["DeepSpeed"])
    failing.write_text(EXAMPLES["DeepSpeed"].replace("        engine.eval()\n", "        1 / 0\n"))
    for said, status in on_ranks(2, _after_a_failure, f"{failing}:main", f"{whole}:main", tmp_path):
        assert "ZeroDivisionError" in said
        assert status == "completed"


@pytest.mark.parametrize("title", CHANGES)
def test_a_script_becomes_a_trial_with_few_changed_lines(title: str) -> None:
    lines, kept = CHANGES[title].splitlines(), re.split(r"\n\s*", EXAMPLES[title])
    added, removed = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "+-")
    assert len(added) <= 15
    assert len(removed) <= 15
    assert not [line for line in added if line not in kept]
    assert not [line for line in removed if line in kept]


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_short(title: str) -> None:
    assert 0 < len(EXAMPLES[title].splitlines()) < 80
