"""What `Objective.export` returns is exported instead of the model."""

import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError
from hpsearch.search.study.preflight import check_objective_code
from tests.factories import spec_of
from tests.objectives.training.support import Wine, fit


class Encoder(Wine):
    def export(self, model, config):
        return model[1][:2], torch.zeros(2, 13)


def test_the_module_and_the_inputs_of_export_are_used():
    result = fit(Encoder(), epochs=1)
    exported = result.exportable_model()
    assert exported.module is not result.model
    assert exported.source == "Encoder.export"
    assert [(name, part.shape) for name, part in exported.inputs] == [("", (2, 13))]
    program = torch.export.export(
        exported.module, (exported.inputs[0][1],), dynamic_shapes=[{0: torch.export.Dim.AUTO}]
    )
    inputs = torch.randn(5, 13)
    assert torch.equal(program.module()(inputs), result.model[1][:2](inputs))


class Named(Wine):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def export(self, model, config):
        return self.found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (nn.Linear(2, 2), "Named.export must return a module and its example inputs, not Linear"),
        ((torch.zeros(2, 2), nn.Linear(2, 2)), "Named.export must return a module and its example inputs"),
        ((nn.Linear(2, 2), torch.zeros(1, 2)), "Named.export must return inputs with at least two samples"),
        ((nn.Linear(2, 2), {}), "inputs"),
    ],
)
def test_a_wrong_result_is_an_error(found, message):
    with pytest.raises(ObjectiveError, match=message):
        fit(Named(found), epochs=1).exportable_model()


class Narrow(Wine):
    def export(self, model, config):
        return model, torch.zeros(2, 12)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Named(nn.Linear(2, 2)), "Named.export must return a module"),
        (Narrow(), "Narrow.export: .*must match the size|shapes"),
    ],
)
def test_a_wrong_export_is_an_error_before_the_study_exists(objective, message):
    with pytest.raises(ObjectiveError, match=message):
        check_objective_code(objective, spec_of(name="none"))
