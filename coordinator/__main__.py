"""`python -m coordinator`."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
