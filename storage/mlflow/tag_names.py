"""Names of MLflow tags of runs, models and registered versions. Never rename a tag, because stored runs have it."""

PREFIX = "hpsearch."

# Runs of studies, trials, finalists and refits, which are found by these tags.
STUDY = "hpsearch.study"  # name of the study; also a tag of models
STUDY_ID = "hpsearch.study_id"
TRIAL = "hpsearch.trial"  # number of the trial; also a tag of models
FINALIST_OF = "hpsearch.finalist_of"  # finalists: number of the trial of the search that is retrained
REFIT_OF = "hpsearch.refit_of"  # refits: number of the trial whose configuration is trained
SEED = "hpsearch.seed"  # finalists and refits: seed of the training

NOTE = "mlflow.note.content"  # MLflow's tag for the description of a run, in Markdown

# A trial's run.
STATE = "hpsearch.state"
REASON = "hpsearch.reason"
OBJECTIVE = "hpsearch.objective"
ATTEMPT = "hpsearch.attempt"
PRUNING = "hpsearch.pruning"  # JSON: pruner, epoch (from 0), value, cutoff, peers, rung
RESUMED = "hpsearch.resumed"
OUT_OF_BOUNDS = "hpsearch.out_of_bounds"  # violated constraints; on a study's run: number of trials that violate one
TRACKING = "hpsearch.tracking"  # description of the data that are missing from the run
MODEL_ID = "hpsearch.model_id"
REMOVED = "hpsearch.removed"  # set when model and checkpoint were removed to free disk space
VERSIONS = "hpsearch.versions"
DEVICE = "hpsearch.device"
DEVICES = "hpsearch.devices"  # number of devices that train the trial together
OBJECTIVE_SHA256 = "hpsearch.objective_sha256"
DATA_SHA256 = "hpsearch.data_sha256"  # also a tag of registered versions
GIT_DIRTY = "hpsearch.git_dirty"
ON_FRONT = "hpsearch.on_front"  # true or false
FINALIST = "hpsearch.finalist"  # the verdict on the finalist
FINALIST_RANK = "hpsearch.finalist_rank"
TEST_OPENED = "hpsearch.test_opened"
TEST_CONFIRMED = "hpsearch.test_confirmed"

# A study's run.
TRIALS = "hpsearch.trials"
COMPLETE = "hpsearch.complete"
PRUNED = "hpsearch.pruned"
INFEASIBLE = "hpsearch.infeasible"
FAILED = "hpsearch.failed"
BEST_TRIAL = "hpsearch.best_trial"
BEST_RUN_ID = "hpsearch.best_run_id"
FRONT = "hpsearch.front"
WINNER = "hpsearch.winner"
WINNER_RUN_ID = "hpsearch.winner_run_id"
FINALISTS_FRONT = "hpsearch.finalists_front"

# A model or a registered version.
WEIGHTS_ONLY = "hpsearch.weights_only"  # reason why the model is stored as a checkpoint instead of an exported model
EXPORT_SOURCE = "hpsearch.export_source"  # method of the objective that returned the module, such as "Points.export"
PROMOTED_BY = "hpsearch.promoted_by"  # the user who promoted it with `hpsearch promote`
