"""FSDP: a sharded model trains, resumes and is served like that of one process."""

import contextlib
import dataclasses
import functools
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpsearch import Step, TrainConfig, Trainer
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.ranks import current_ranks
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.session import LocalSession, MidEpochAction, Verdict
from tests.objectives.training.ranks.support import AVERAGED, SHARDED, WideSides, apart, on_ranks, outcome

EPOCHS = 2

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("ranks")]  # the tests share runs


class Tied(WideSides):
    """Two layers share a weight, and one parameter is in no layer."""

    def model(self, config, train):
        return TiedLayers(torch.ones(1))


class TiedLayers(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight, self.scale = self.first.weight, nn.Parameter(scale)

    def encode(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        return self.head(self.encode(x) * self.scale)


class Thawing(WideSides):
    """The first layer is trained from the second epoch on, and the model receives the epoch."""

    def model(self, config, train):
        made = super().model(config, train)
        made[0].requires_grad_(False)
        made.last_epoch = -1
        return made

    def on_epoch(self, model, epoch, config):
        model.last_epoch = epoch
        model[0].requires_grad_(epoch > 0)


class Failing(WideSides):
    """One rank fails after a step, while the others wait for its shards."""

    def on_epoch(self, model, epoch, config):
        if epoch == 1 and not current_ranks().is_rank_zero:
            raise KeyError("no such layer")


class Encoded(WideSides):
    """A step that calls the model's layers, directly and with a method, but never the model."""

    def model(self, config, train):
        return Halves()

    def step(self, model, batch, config):
        outputs = model.head(model.encode(batch.x))
        return Step(nn.functional.cross_entropy(outputs, batch.y), outputs=outputs)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 15), nn.Linear(15, 2)

    def encode(self, x):
        return torch.tanh(self.body(x))


class Scalar(WideSides):
    def model(self, config, train):
        return TiedLayers(torch.tensor(1.0))


class Reaching(WideSides):
    """A step that calls a method that uses a weight."""

    def model(self, config, train):
        return TiedLayers(torch.ones(1))

    def step(self, model, batch, config):
        outputs = nn.functional.linear(batch.x, model.head.weight)
        return Step(nn.functional.cross_entropy(outputs, batch.y), outputs=outputs)


HYBRID = dataclasses.replace(AVERAGED, shard_mesh_size=2)
RUNS = {
    "sgd": (WideSides, dataclasses.replace(SHARDED, optimizer="sgd", lr=0.1)),
    "ema": (WideSides, AVERAGED),
    "swa": (WideSides, dataclasses.replace(SHARDED, swa_fraction=0.5)),
    "offload": (WideSides, dataclasses.replace(SHARDED, cpu_offload=True, clip_grad_norm=None, clip_grad_value=0.01)),
    "hsdp": (WideSides, HYBRID),
    "unsharded until the backward pass": (Tied, dataclasses.replace(SHARDED, reshard_after_forward=False)),
    "tied": (Tied, SHARDED),
    "thawing": (Thawing, SHARDED),
    "own step": (Encoded, SHARDED),
}
MUON = dataclasses.replace(SHARDED, optimizer="muon")
ON_FOUR = ("sgd", "ema", "hsdp")
RESUMED = [("two", "after"), ("two", "within"), ("one", "after")]
REFUSED = {"scalar": Scalar, "a weight outside its layer": Reaching}


class Kept:
    """A session that stores only checkpoints, and stops the run after or within its first epoch."""

    run_dir = shards = None

    run_dir = shards = curve = None

    def __init__(self, run_dir, leave=None):
        local = LocalSession(run_dir, synced=False)
        self.restore, self.save, self.save_mid_epoch, self.log = (
            local.restore,
            local.save,
            local.save_mid_epoch,
            local.log,
        )
        self.leave, self.asked = leave, 0

    def mid_epoch_action(self, left):
        self.asked += 1
        return MidEpochAction.SAVE_AND_STOP if self.leave == "within" and self.asked == 1 else MidEpochAction.NONE

    def report(self, record):
        return Verdict.STOP if self.leave == "after" else Verdict.CONTINUE


def fit(objective, config, session=None):
    return Trainer(objective, config, epochs=EPOCHS, seed=0, session=session).fit()


def trained(name):
    objective, config = RUNS[name]
    return served(fit(objective(), config))


def served(result):
    """Return the results of a run on rank 0; None on others, whose model has no weights."""
    if any(parameter.is_meta for parameter in result.model.parameters()):
        return None
    kinds = {type(module).__name__ for module in result.model.modules()}
    assert not any(kind.startswith("FSDP") for kind in kinds), kinds
    assert not any(isinstance(tensor, DTensor) for tensor in result.model.state_dict().values())
    return (
        *outcome(result),
        getattr(result.model, "last_epoch", None),
        result.best_value,
        len(list(result.model.parameters())),
    )


def leave(folder):
    for where in ("after", "within"):
        session = Kept(folder / where, where)
        assert fit(WideSides(), AVERAGED, session).status == "stopped"
        assert session.asked or where == "after" or not current_ranks().is_rank_zero


def resume(folder):
    """Resume the stopped run."""
    return served(fit(WideSides(), AVERAGED, Kept(folder)))


def copied(source, target):
    shutil.copytree(source, target)
    return target


def refused(objective):
    try:
        fit(objective(), SHARDED)
    except ObjectiveError as error:
        return str(error)


def noted():
    """Return the step log of an epoch, and the run."""
    run = Trainer(WideSides(), SHARDED, epochs=1, seed=0).build()
    train_epoch(run, 0)
    return run.steplog.drain(), run


def count_communication(objective, **settings):
    """Return the reductions and gathers of an epoch of 7 micro-batches, with FSDP's calls replaced by counting ones."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as calls

    config = TrainConfig(strategy="fsdp", batch_size=16, **settings)
    run = Trainer(objective(), config, epochs=1, seed=0).build()
    counts, originals = dict.fromkeys(("foreach_reduce", "foreach_all_gather"), 0), {}

    def count(name, *arguments, **more):
        counts[name] += 1
        return originals[name](*arguments, **more)

    for name in counts:
        originals[name] = getattr(calls, name)
        setattr(calls, name, functools.partial(count, name))
    try:
        train_epoch(run, 0)
    finally:
        for name, original in originals.items():
            setattr(calls, name, original)
    return list(counts.values())


def caches_casts():
    """Return whether autocast keeps the casts of all weights in a bf16 run."""
    run = Trainer(WideSides(), dataclasses.replace(SHARDED, precision="bf16"), epochs=1, seed=0).build()
    with run.precision.autocast():
        return torch.is_autocast_cache_enabled()


def on_two(ranks, folder):
    refused(Scalar)
    with contextlib.suppress(ObjectiveError), ranks.fail_together():  # later runs have new connections
        raise ObjectiveError("both fail")
    with pytest.raises(ObjectiveError, match="no such layer"), ranks.fail_together():
        fit(Failing(), SHARDED)
    found = {name: trained(name) for name in RUNS}
    found["muon"] = [served(fit(WideSides(), dataclasses.replace(MUON, strategy=name))) for name in ("fsdp", "ddp")]
    leave(folder)
    found["refused"] = {name: refused(objective) for name, objective in REFUSED.items()}
    found["noted"], run = noted()
    found["caches casts"] = caches_casts()
    found["communication"] = [
        count_communication(Tied, gradient_accumulation_steps=2),
        count_communication(Tied, gradient_accumulation_steps=2, sync_each_micro_batch=True),
        count_communication(Tied, gradient_accumulation_steps=2, reshard_after_forward=False),
    ]
    found["held"] = sum(parameter.to_local().numel() for parameter in run.model.parameters())
    result = fit(WideSides(), dataclasses.replace(AVERAGED, compile=True))
    found["compiled"] = result.resume_note, [record.metrics["val_loss"] for record in result.history]
    if ranks.is_rank_zero:
        module, inputs, *_ = result.exportable_model()
        torch.export.save(torch.export.export(module, tuple(x for _, x in inputs)), folder / "model.pt2")
        torch.save((result.val.x[:4], module(result.val.x[:4]).detach()), folder / "expected.pt")
    return found


def count_own_weights(config):
    run = Trainer(WideSides(), config, epochs=1, seed=0).build()
    return sum(parameter.to_local().numel() for parameter in run.model.parameters())


def on_four(_ranks, folder):
    with pytest.raises(ObjectiveError, match="shard_mesh_size=3 must divide the number of devices, 4; change one"):
        fit(WideSides(), dataclasses.replace(SHARDED, shard_mesh_size=3))
    return {
        "held": [count_own_weights(config) for config in (SHARDED, HYBRID)],
        **{name: trained(name) for name in ON_FOUR},
        **{(of, where): resume(folder / of / where) for of, where in RESUMED},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("alone")
    leave(folder)
    own = {"noted": noted()[0], "caches casts": caches_casts()}
    return folder, {**{name: trained(name) for name in RUNS}, **own}


@pytest.fixture(scope="module")
def two(tmp_path_factory, alone):
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, on_two, folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory, alone, two):
    folder = tmp_path_factory.mktemp("four")
    copied(two[0], folder / "two")
    copied(alone[0], folder / "one")
    return on_ranks(4, on_four, folder)


@pytest.mark.parametrize(
    ("world", "name"),
    [*((2, name) for name in RUNS), *(pytest.param(4, name, marks=pytest.mark.soak) for name in ON_FOUR)],
)
def test_fsdp_training_equals_one_process(name, world, alone, two, request):
    first, *others = two[1] if world == 2 else request.getfixturevalue("four")
    expected = alone[1][name]
    numbers, weights = apart(first[name], expected)
    assert numbers < 1e-6, numbers
    assert weights < 1e-5, weights
    assert first[name][2:] == pytest.approx(expected[2:])  # the changed settings, the best value, the number of weights
    assert all(other[name] is None for other in others)
    assert expected[0][0] != expected[0][-1]  # it learned


def test_muon_on_shards_equals_muon_on_full_gradients(two):
    """bfloat16 increases the rounding of sums over ranks, so the comparison uses the same number of ranks."""
    numbers, weights = apart(*two[1][0]["muon"])
    assert numbers < 1e-6, numbers
    assert weights < 1e-5, weights


def test_each_rank_holds_only_its_shard(two):
    total = sum(parameter.numel() for parameter in WideSides().model(None, None).parameters())
    held = [found["held"] for found in two[1]]
    assert sum(held) == total
    assert max(held) < 0.6 * total


def test_two_groups_of_ranks_hold_replicas_of_the_shards(four):
    total = sum(parameter.numel() for parameter in WideSides().model(None, None).parameters())
    assert sum(found["held"][0] for found in four) == total
    assert [found["held"][1] for found in four[:2]] == [found["held"][1] for found in four[2:]]
    assert sum(found["held"][1] for found in four[:2]) == total


def test_autocast_does_not_keep_a_copy_of_the_whole_model_on_each_rank(alone, two):
    assert alone[1]["caches casts"]
    assert [found["caches casts"] for found in two[1]] == [False, False]


def test_gradients_are_reduced_once_per_step_and_the_root_is_gathered_once_per_micro_batch(two):
    """The model has two groups of weights: the head, and the rest in the root; 7 micro-batches make 4 steps."""
    once, each, unsharded = two[1][0]["communication"]
    assert (once[0], each[0], unsharded[0]) == (4 * 2, 7 * 2, 4 * 2)
    assert once[1] == each[1] == 7 * (2 + 1), "the head before the forward and the backward pass, the root once"
    assert unsharded[1] == 7 * 2, "the head once, too"


def test_compiled_fsdp_training_is_equal_or_marked_not_exact(alone, two):
    note, losses = two[1][0]["compiled"]
    assert note is None or note.startswith("model not compiled: ")
    assert losses == pytest.approx([epoch["val_loss"] for epoch in alone[1]["ema"][0]], abs=1e-5)


def test_layer_norms_of_gradients_are_those_of_full_gradients(alone, two):
    found, expected = two[1][0]["noted"], alone[1]["noted"]
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert list(one["layers"]) == list(other["layers"])
        assert one["layers"] == pytest.approx(other["layers"], rel=1e-4, abs=1e-6)


def form(value):
    """Return the structure of a state without its values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, type(value), value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return {key: form(inner) for key, inner in value.items()}
    return [form(inner) for inner in value] if isinstance(value, list) else type(value)


def test_a_checkpoint_of_ranks_has_the_format_of_one_process(alone, two):
    found, expected = (checkpoint.read(folder / "after" / "last.pt") for folder in (two[0], alone[0]))
    for part in ("model", "optimizer", "average"):
        assert form(found[part]) == form(expected[part]), part
    assert form(found["best"]["model"]) == form(expected["best"]["model"])


@pytest.mark.parametrize(
    ("of", "where", "world"),
    [("two", "after", 1), ("two", "within", 1), *(pytest.param(*r, 4, marks=pytest.mark.soak) for r in RESUMED)],
)
def test_a_stopped_fsdp_run_resumes_on_any_number_of_ranks(of, where, world, alone, two, request, tmp_path):
    ranks = None if world == 1 else request.getfixturevalue("four")
    found = resume(copied(two[0] / where, tmp_path / where)) if ranks is None else ranks[0][of, where]
    expected = alone[1]["ema"]
    for epoch, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        partly = where == "within" and epoch == 0  # its training metrics cover only the steps after the resume
        for key in (key for key in other if not (partly and key.startswith("train_") and key != "train_loss")):
            assert one[key] == pytest.approx(other[key], abs=1e-6), (epoch, key)
    assert max(abs(found[1][key] - weight).max() for key, weight in expected[1].items()) < 1e-5


def test_the_model_of_a_run_on_ranks_can_be_served(two):
    _, weights, _, best, _ = two[1][0]["ema"]
    fresh = WideSides().model(None, None)
    fresh.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    val = WideSides().data(0).val
    assert (fresh(val.x).argmax(1) == val.y).double().mean().item() == pytest.approx(best)
    load = (
        "import sys, torch; x, expected = torch.load(sys.argv[2]); found = torch.export.load(sys.argv[1]).module()(x);"
        "assert torch.allclose(found, expected, atol=1e-6), found; assert 'hpsearch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", load, two[0] / "model.pt2", two[0] / "expected.pt"], check=True)


def test_a_model_that_cannot_be_sharded_is_rejected_in_one_line(two):
    for found in two[1]:
        said = found["refused"]
        assert "Change scale to a 1D tensor" in said["scalar"]
        assert "strategy='ddp'" in said["a weight outside its layer"]
        assert "Reaching.step" in said["a weight outside its layer"]
        assert "test_fsdp.py" in said["a weight outside its layer"]
        assert not any("\n" in line for line in said.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({"optimizer": name}, f"optimizer='{name}'") for name in ("lamb", "lars", "ranger", "lookahead", "sam")),
        ({"precision": "fp16"}, "use 'bf16'"),
        ({"channels_last": True}, "channels_last=True"),
        ({"strategy": "ddp", "cpu_offload": True}, "cpu_offload=True needs strategy='fsdp', not 'ddp'"),
        ({"strategy": "ddp", "shard_mesh_size": 8}, "shard_mesh_size=8 needs strategy='fsdp'"),
        ({"strategy": "ddp", "reshard_after_forward": False}, "reshard_after_forward=False needs strategy='fsdp'"),
        ({"shard_mesh_size": 1}, "shard_mesh_size must be at least 2, not 1"),
        ({"static_graph": True}, "static_graph=True needs strategy='ddp', not 'fsdp'"),
        ({"bucket_cap_mb": 50}, "bucket_cap_mb=50 needs strategy='ddp'"),
        ({"strategy": "ddp", "bucket_cap_mb": 0}, "bucket_cap_mb must be at least 1, not 0"),
        ({"strategy": "ddp", "static_graph": True, "find_unused_parameters": True}, "remove find_unused_parameters"),
        ({"strategy": "ddp", "static_graph": True, "compile": True}, "not available with compile=True"),
        ({"strategy": "ddp", "static_graph": True, "gradient_accumulation_steps": 2}, "a resume would not be exact"),
        ({"strategy": "ddp", "sync_each_micro_batch": True}, "sync_each_micro_batch=True needs strategy='fsdp'"),
    ],
)
def test_incompatible_settings_are_rejected_in_one_line(settings, said):
    with pytest.raises(ObjectiveError, match=said) as refusal:
        TrainConfig(**{"strategy": "fsdp", **settings})
    assert "\n" not in str(refusal.value)
