"""``hpsearch``, and ``python -m hpsearch``."""

from hpsearch.search.process import leave_when_told


def main() -> None:
    """Run the command line, which takes seconds to load."""
    leave_when_told()
    from hpsearch.search.cli import main as run

    run()


if __name__ == "__main__":
    main()
