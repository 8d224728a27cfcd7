"""``hpsearch``, and ``python -m hpsearch``."""

import os

from hpsearch.search.process import exit_on_signals, pop_exit_file, prepare_exit


def main() -> None:
    """Run the command line, which takes seconds to load."""
    exit_on_signals()
    exit_file = pop_exit_file(os.environ)
    from hpsearch.search.cli import main as run

    try:
        run()
    except SystemExit as error:
        prepare_exit(error.code if isinstance(error.code, int) else 0, exit_file)
        raise


if __name__ == "__main__":
    main()
