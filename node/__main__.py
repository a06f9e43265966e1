"""`python -m node`, the same as the `node` command."""

from node.cli import main

if __name__ == "__main__":
    main()
