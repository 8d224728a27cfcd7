"""Names of MLflow tags of runs, models and registered versions. They are stored: never rename one."""

PREFIX = "hpsearch."

# Runs of studies, trials, finalists and refits, which are found by these tags.
STUDY = "hpsearch.study"  # name; of models too
STUDY_ID = "hpsearch.study_id"
TRIAL = "hpsearch.trial"  # number; of models too
FINALIST_OF = "hpsearch.finalist_of"  # the trial that a finalist's run repeats
REFIT_OF = "hpsearch.refit_of"  # the trial whose configuration a refit's run trains
SEED = "hpsearch.seed"  # of a finalist's or refit's run

# A trial's run.
STATE = "hpsearch.state"
REASON = "hpsearch.reason"
OBJECTIVE = "hpsearch.objective"
ATTEMPT = "hpsearch.attempt"
PRUNING = "hpsearch.pruning"  # JSON: pruner, epoch (from 0), value, cutoff, peers, rung
RESUMED = "hpsearch.resumed"
OUT_OF_BOUNDS = "hpsearch.out_of_bounds"  # the violated constraints; of a study's run: the number of such trials
TRACKING = "hpsearch.tracking"  # what is missing from the run
MODEL_ID = "hpsearch.model_id"
REMOVED = "hpsearch.removed"  # the model and checkpoint were removed to free their space
VERSIONS = "hpsearch.versions"
DEVICE = "hpsearch.device"
DEVICES = "hpsearch.devices"  # the number that train the trial together
OBJECTIVE_SHA256 = "hpsearch.objective_sha256"
DATA_SHA256 = "hpsearch.data_sha256"  # of registered versions too
GIT_DIRTY = "hpsearch.git_dirty"
ON_FRONT = "hpsearch.on_front"  # true or false
FINALIST = "hpsearch.finalist"  # the verdict
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
WEIGHTS_ONLY = "hpsearch.weights_only"  # the reason why the model was not exported and is a checkpoint
PROMOTED_BY = "hpsearch.promoted_by"  # the user who promoted it with `hpsearch promote`
