"""Keys of the user attributes that hpsearch stores in Optuna's tables, and that the Optuna dashboard displays."""

import json
from typing import Any

# Attributes of a study.
SPEC = "hpsearch:spec"  # the fields of hpsearch.search.spec.StudySpec, as JSON
STOPPED = "hpsearch:stopped"  # user, host and time of the stop request
EARLY_TERMINATION = "hpsearch:given_up"  # early termination: fields of hpsearch.storage.trials.early_stop.EarlyStop
EXPECTED_GAIN = "hpsearch:foreseen"  # last estimate for the rest of the budget: {"gain", "ended"} (finished trials)
STARTED_AT = "hpsearch:started_at"  # unix seconds of the last `run`; the study's timeout starts at this time
TRACKING_URI = "hpsearch:tracking_uri"
CHECKPOINT_URL = "hpsearch:checkpoint_url"
FOLDER_NAME = "hpsearch:folder"  # name of the study's folders; unique, because other databases may share the disk
SOURCE_SHA256 = "hpsearch:objective_sha256"  # hash of the objective's source file at the creation of the study
RESTORED = "hpsearch:restored"  # true: the study is from a backup, and its objective needs the user's confirmation
RESTORED_CHECKPOINTS = "hpsearch:restored_checkpoints"  # true: the user has not confirmed them
VERSION = "hpsearch:release"  # version of hpsearch that created the study
SMOKE_TEST = "hpsearch:smoke"  # result of the smoke test, one sentence
BOUNDS = "hpsearch:bounds"  # declared bounds of the metric: [low, high], each null if there is none
VAL_SAMPLES = "hpsearch:val_samples"  # number of samples of the validation split
WANTED_WORKERS = "hpsearch:wanted_workers"  # number of workers that the study should have; `fleet size` sets it
DEVICES = "hpsearch:devices"  # number of devices of each trial in the first `run` of the study
LEAKS = "hpsearch:leaks"  # signs of leakage in the data: a description by kind

# Attributes of a study or a trial.
RUN_ID = "hpsearch:mlflow_run_id"  # study: the parent run; trial: the trial's run
RUN_URL = "hpsearch:mlflow_url"
DATA_SHA256 = "hpsearch:data_sha256"  # study: hash of the data at its creation; trial: of its data, if it differs

# Attributes of a trial.
ORIGIN = "hpsearch:origin"  # enqueued trials: "default", or the file and the line of the parameters
ATTEMPT = "hpsearch:attempt"  # number of attempts so far, from 1
LAST_PROGRESS = "hpsearch:got_on"  # last attempt above 1 that stored a new checkpoint; retries are counted from it
WORKER = "hpsearch:worker"  # current or last worker
REASON = "hpsearch:reason"  # reason for the final state, as text
INFEASIBLE = "hpsearch:infeasible"  # the trial diverged or ran out of memory; PRUNED in Optuna, counted separately
VIOLATIONS = "hpsearch:out_of_bounds"  # violated constraints, one line each; such a trial cannot be promoted
PRUNING = "hpsearch:pruning"  # evidence for pruning: the fields of a Decision of search.pruners.base_and_halving
BUDGET_CUT = "hpsearch:cut"  # the budget was spent while the trial ran; the trial resumes if the budget grows
RUNG = "hpsearch:rung"  # last pause: rung, epoch (from 0), rank, number of trials at the rung
DEVICE_SPEED = "hpsearch:pace"  # trials on several devices: median over the epochs of each speed metric, by name
FOLDS_ERROR = "hpsearch:folds_error"  # trials with folds: standard error of the value, which is their mean
# Trials of population-based training whose configuration changed: a list of {"epoch" (the first, from 0), "trial" (that
# trained from this epoch on), "params"}. The trial's own parameters are those of its start.
CONFIG_SCHEDULE = "hpsearch:config_schedule"
MODEL = "hpsearch:mlflow_model_id"
MODEL_SHA256 = "hpsearch:mlflow_model_sha256"  # {model id: SHA-256 of the model's files, see compute_folder_sha256}
TRACKING = "hpsearch:tracking"  # finished trials: the records that MLflow lacks
PENDING = "pending"  # prefix of TRACKING while records are in the outbox
REFUSED = "refused"  # prefix of TRACKING after the tracking server rejected records
REMOVED_BY = "hpsearch:removed"  # user and host that deleted the model and the best checkpoint
PARENT_TRIAL = "hpsearch:finalist_of"  # finalists: the trial of the search that is retrained
TRAINING_SEED = "hpsearch:seed"  # finalists: the seed of the training
RESPLIT_SCORE = "hpsearch:fresh"  # finalists on a new split: the result of ResplitScore.to_record()
REFIT = "hpsearch:refit"  # refits on training and validation data: {"train_loss"} of the last epoch

# Attribute of multi-objective trials as samplers receive them; not stored.
VALUES = "hpsearch:values"  # {step: values of all metrics, in the order of the study's directions}


class DamagedValue(str):
    """The text of an attribute in the database that is not valid JSON."""


def make_default_folder_name(study: str, study_id: int) -> str:
    """Return the name of the folders of a study without the attribute `FOLDER_NAME`."""
    return f"{study}-{study_id}"


def decode_attr(text: str) -> Any:
    """Return the value of an attribute from its JSON text; a `DamagedValue` if the text is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return DamagedValue(text)
