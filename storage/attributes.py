"""The user attributes that hpsearch keeps in Optuna's tables, all of them; the dashboard and notebooks see them too."""

# Of a study.
SPEC = "hpsearch:spec"  # what is searched, as JSON: the fields of hpsearch.search.spec.StudySpec
STOPPED = "hpsearch:stopped"  # who stopped the study, and when
GIVEN_UP = "hpsearch:given_up"  # why the rest of its budget was: the fields of hpsearch.storage.trials.budget.GivenUp
FORESEEN = "hpsearch:foreseen"  # what the rest was expected to gain last: {"gain", "ended"}, the trials that had ended
STARTED_AT = "hpsearch:started_at"  # unix seconds of the last `run`, which a timeout counts from
TRACKING_URI = "hpsearch:tracking_uri"
CHECKPOINT_URL = "hpsearch:checkpoint_url"
FOLDER = "hpsearch:folder"  # what its folders are called: studies of other databases may share the disk
SOURCE = "hpsearch:objective_sha256"  # of the file the objective is defined in, when the study was created
RELEASE = "hpsearch:release"  # the version of hpsearch that created it
SMOKE = "hpsearch:smoke"  # what the smoke test came to, in a sentence

# Of a study and of a trial.
RUN_ID = "hpsearch:mlflow_run_id"  # on a study the parent run, on a trial its own
RUN_URL = "hpsearch:mlflow_url"

# Of a trial.
ORIGIN = "hpsearch:origin"  # of one whose parameters somebody gave: "default", or the file and the line
ATTEMPT = "hpsearch:attempt"  # how often it was started, from 1
GOT_ON = "hpsearch:got_on"  # the last attempt but the first that added an epoch with a checkpoint: retries count anew
WORKER = "hpsearch:worker"  # who runs it, or ran it last
REASON = "hpsearch:reason"  # why it ended as it did, for a person
INFEASIBLE = "hpsearch:infeasible"  # it diverged or did not fit in memory: PRUNED to Optuna, counted apart
BROKEN = "hpsearch:out_of_bounds"  # the constraints that it breaks, a line for each: no finalist, and not promoted
PRUNING = "hpsearch:pruning"  # the grounds on which it was pruned: the fields of a Decision of search.pruners.base
CUT = "hpsearch:cut"  # it ran when the budget in epochs or seconds was spent: it goes on where that grows
RUNG = "hpsearch:rung"  # where it was paused last: rung, epoch (from 0), rank, how many had reached it
PACE = "hpsearch:pace"  # of one trained on several devices: the medians of its epochs' metrics of that, by their names
MODEL = "hpsearch:mlflow_model_id"
TRACKING = "hpsearch:tracking"  # once it has ended: what of it MLflow does not have, or not yet
PENDING = "pending"  # how TRACKING begins while records are on their way
REMOVED = "hpsearch:removed"  # who removed its model and its best checkpoint, to free their space
PARENT_TRIAL = "hpsearch:finalist_of"  # of a finalist: the trial of the search that it trains again
TRAINING_SEED = "hpsearch:seed"  # of a finalist
FRESH = "hpsearch:fresh"  # of a finalist on a fresh division: what its score rests on, as FreshScore.record() has it
REFIT = "hpsearch:refit"  # of a run on train and validation: {"train_loss"} of its last epoch

# Of a trial of several metrics as its sampler is shown it, in no table.
VALUES = "hpsearch:values"  # {step: values of all metrics, in the order of the study's directions}
PLACE = "constraints:hpsearch:place"  # of a pruned one among the others: to Optuna, by how much it breaks a constraint
