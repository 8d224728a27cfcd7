"""Checkpoints that others can replace do not reach `set_extra_state` of a model's layers, which may unpickle them."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.loaded_state import find_extra_state, find_replaced_method
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.weights import BestWeights
from hpsearch.search.samplers.suggest import derive_training_seed
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.checkpoint_origin import find_unsafe_part
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.errors import UnsafeCheckpointError
from tests.factories import spec_of
from tests.search.study.untrusted.support import Mine, make_trial
from tests.search.worker.checkpointed import Study, state_after

_PICKLE = torch.frombuffer(bytearray(pickle.dumps({"scale": 1.0})), dtype=torch.uint8)
_ALLOW = "HPSEARCH_ALLOW_EXTRA_STATE"


class Quantized(nn.Linear):
    """A layer that stores its state as TransformerEngine does."""

    def get_extra_state(self) -> Tensor:
        return _PICKLE

    def set_extra_state(self, state: Tensor) -> None:
        pickle.loads(state.numpy().tobytes())


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"model": nn.Sequential(Quantized(2, 2)).state_dict()}, "model.0._extra_state"),
        ({"best": {"model": [{"_extra_state": _PICKLE.float()}]}}, "best.model.0._extra_state"),
        ({"average": {"module.a._extra_state": torch.empty(9, device="meta")}}, "average.module.a._extra_state"),
        ({"model": {"_extra_state": b"pickle"}}, "model._extra_state"),
        ({"model": {"_extra_state": {"a": 1}}}, "model._extra_state"),
        ({"model": nn.Linear(2, 2).state_dict(), "extra_state": b"x"}, None),
        ({"model": {"_extra_state": torch.empty(0, dtype=torch.uint8), "b._extra_state": 3}}, None),
    ],
)
def test_extra_state_that_may_be_a_pickle_is_found(
    state: Mapping[str, Any], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (find_unsafe_part(state) or "").partition(" is extra state")[0] == (found or "")
    monkeypatch.setenv(_ALLOW, "1")
    assert find_unsafe_part(state) is None


@pytest.mark.parametrize("place", ["state", "model", "metadata"])
def test_attributes_cannot_hide_content(tmp_path: Path, place: str) -> None:
    """PyTorch sets attributes of these types, and `load_state_dict` does not use their methods."""
    hidden = OrderedDict({"_extra_state": _PICKLE})
    hidden.items = set  # type: ignore[method-assign]
    outer = OrderedDict(weight=torch.ones(1))
    outer._metadata = hidden  # type: ignore[attr-defined]
    state = {"state": OrderedDict(model=1), "model": {"model": hidden}, "metadata": {"model": outer}}[place]
    if place == "state":
        state.items = set  # type: ignore[method-assign, assignment]
    checkpoint.write(tmp_path / "x.pt", dict(state) if place == "metadata" else state)
    with pytest.raises(checkpoint.CheckpointError, match=r"manipulated: attributes of .* replace methods"):
        checkpoint.read(tmp_path / "x.pt")
    assert find_extra_state(hidden) == "_extra_state"
    hidden.__dict__ = OrderedDict()
    assert find_replaced_method(hidden) == ""
    counter = Counter(a=1)
    counter.items = set  # type: ignore[method-assign]
    assert find_replaced_method({"a": [counter]}) == "a.0"


def test_attributes_of_tensors_cannot_hide_content(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.numel = complex  # type: ignore[method-assign, assignment]
    checkpoint.write(tmp_path / "x.pt", {"model": {"_extra_state": parameter}})
    with pytest.raises(checkpoint.CheckpointError, match=r"attributes of model\._extra_state replace methods"):
        checkpoint.read(tmp_path / "x.pt")
    parameter.numel = torch.ones(1).numel  # type: ignore[method-assign]
    assert find_extra_state({"_extra_state": parameter}) == "_extra_state"


@dataclasses.dataclass
class Kept:
    """A class that a user allows."""

    rate: float = 0.5


def test_classes_that_the_user_allows_are_read(tmp_path: Path) -> None:
    state = {"kept": Kept(0.25), "kind": OrderedDict}
    with torch.serialization.safe_globals([Kept]):
        checkpoint.check_readable(state)
        checkpoint.write(tmp_path / "x.pt", state)
        assert checkpoint.read(tmp_path / "x.pt") == state


def test_states_with_own_attributes_and_cycles_are_read(tmp_path: Path) -> None:
    parts: list[Any] = [Counter("ab"), nn.Linear(2, 2).state_dict(), torch.float32, torch.Size([1]), {3}, b"x", None]
    parts[1]["weight"].kept = "own"
    parts.append(parts)
    checkpoint.write(tmp_path / "x.pt", {"parts": parts})
    found = checkpoint.read(tmp_path / "x.pt")["parts"]
    assert found[0] == Counter("ab")
    assert found[1]._metadata == parts[1]._metadata
    assert found[-1] is found


def test_the_weights_in_mlflow_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = SimpleNamespace(spec=parse_spec(spec_of(name="none").model_dump()))
    trial, spec = make_trial(0.5), study.spec
    weights = BestWeights(cast("StoredStudy", study), trial, "nothing was promoted")
    identity = {"seed": derive_training_seed(spec, trial.number), "split_seed": spec.seed, "value": 0.5, "folds": None}
    checkpoint.write(tmp_path / "best.pt", {**identity, "model": Quantized(2, 2).state_dict()})
    with pytest.raises(SearchError, match=rf"model\._extra_state is extra state .* set {_ALLOW}=1; nothing was"):
        weights.read(tmp_path / "best.pt", Mine())
    monkeypatch.setenv(_ALLOW, "1")
    assert weights.read(tmp_path / "best.pt", Mine())["model"]["_extra_state"].equal(_PICKLE)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_worker_releases_its_trial_instead(database_url: str, tmp_path: Path, *, is_trusted: bool) -> None:
    study = Study(str(tmp_path / "store"), database_url, tmp_path)
    first = study.attempt(1)
    state = {**state_after(0), "model": Quantized(2, 2).state_dict()}
    first.kept.save(state, best=True)
    first.epoch = 0
    first.commit()
    study.checkpoints.confirmation = None if is_trusted else "add --checkpoint-url"
    second = study.attempt(2, machine="b")
    if is_trusted:
        assert second.restore() == 0
        return
    with pytest.raises(UnsafeCheckpointError, match=r"model\._extra_state is extra state .* add --checkpoint-url$"):
        second.restore()
