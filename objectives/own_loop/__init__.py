"""Own loops: trainings that an objective runs itself, epoch by epoch, with the guarantees of a trial around them.

Imports: errors, search_space, measured, ranks, reproducibility, data, evaluation, base, session, ranked_session, exportable, result, loop, reports, trainer.
"""  # noqa: E501 a room says in one line what it imports
