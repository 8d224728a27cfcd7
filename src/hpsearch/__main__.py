"""``hpsearch``, and ``python -m hpsearch``."""

from hpsearch.search.process import exit_on_signals


def main() -> None:
    """Run the command line, which takes seconds to load."""
    exit_on_signals()
    from hpsearch.search.cli import main as run

    run()


if __name__ == "__main__":
    main()
