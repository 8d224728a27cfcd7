"""Default sampler and pruner of a new study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.grid_and_brute_force import BruteForce, Grid

SAMPLER, PRUNER = "freeze_thaw", "asha"
SAMPLER_OF_PBT = "random"  # all trials start together, so the sampler has nothing to learn from

# With fewer epochs, a rung cannot save much.
MIN_EPOCHS = 4
SAMPLER_OF_SHORT_TRIALS, PRUNER_OF_SHORT_TRIALS = "tpe", "median"


def _is_suited_to_asha(sampler: Any) -> bool:
    """Return whether the given sampler uses paused trials; True if its name is missing or unknown."""
    kind = SamplerSpec.registry.get(str(sampler.get("name"))) if isinstance(sampler, Mapping) else type(sampler)
    return kind not in {Grid, BruteForce} and bool(getattr(kind, "can_use_paused_trials", True))


# Conditions of the other defaults, for help texts.
_SHORT = f"one metric and trials of fewer than {MIN_EPOCHS} epochs"
_WITHOUT_ASHA = ", ".join(name for name in sorted(SamplerSpec.registry) if not _is_suited_to_asha({"name": name}))
EXCEPTIONS = {
    "sampler": f"{SAMPLER_OF_SHORT_TRIALS} for {_SHORT}, and {SAMPLER_OF_PBT} for --pruner pbt",
    "pruner": f"{PRUNER_OF_SHORT_TRIALS} for {_SHORT}, and for the samplers {_WITHOUT_ASHA} (several metrics: none)",
}


def choose_default_names(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the default names of sampler and pruner for the given settings.

    The sampler is `freeze_thaw` and the pruner `asha`. A single-objective study with very short trials has `tpe` and
    `median`. The pruner `pbt` has the sampler `random`. A sampler that does not use paused trials, or lists all
    configurations, has `median`, or `none` in a multi-objective study.

    Args:
        given: the settings of a study, with resolved `directions`.
    """
    pruner = given.get("pruner", {})
    if (pruner.get("name") if isinstance(pruner, Mapping) else getattr(pruner, "name", None)) == "pbt":
        return {"sampler": SAMPLER_OF_PBT, "pruner": PRUNER}
    is_multi_objective = bool(given.get("directions"))
    epochs = given.get("epochs")
    if not is_multi_objective and isinstance(epochs, int) and epochs < MIN_EPOCHS:
        return {"sampler": SAMPLER_OF_SHORT_TRIALS, "pruner": PRUNER_OF_SHORT_TRIALS}
    if _is_suited_to_asha(given.get("sampler", {})):
        return {"sampler": SAMPLER, "pruner": PRUNER}
    return {"sampler": SAMPLER, "pruner": "none" if is_multi_objective else PRUNER_OF_SHORT_TRIALS}
