"""Progress lines in a log."""

from __future__ import annotations

import io

from hpsearch.search.console import PlainConsole, show_steps


def test_a_log_has_only_the_first_and_the_last_of_equal_steps() -> None:
    output = io.StringIO()
    with show_steps(PlainConsole(file=output)) as show_step:
        show_step("opening the study")
        for done in range(21):
            show_step(f"sending 21 trials to MLflow: {done} done")
    lines = ["opening the study", "sending 21 trials to MLflow: 0 done", "sending 21 trials to MLflow: 20 done"]
    assert output.getvalue().splitlines() == lines
