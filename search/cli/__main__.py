"""``python -m search.cli``."""

from search.cli import main

if __name__ == "__main__":
    main()
