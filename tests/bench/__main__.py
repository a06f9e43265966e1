"""`python -m tests.bench NAME [--json]`: measures, and prints a table or one JSON document."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

import tests.bench

NOT_BENCHMARKS = ("__main__", "report", "timing")


def names() -> list[str]:
    """The benchmarks: the modules of this folder with a command `main`; a leading underscore marks a part of one."""
    found = (module.name for module in pkgutil.iter_modules(tests.bench.__path__))
    return sorted(name for name in found if name not in NOT_BENCHMARKS and not name.startswith("_"))


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first word names, with its own options; only that module is imported."""
    known = names()
    if not arguments or arguments[0] not in known:
        print(f"usage: python -m tests.bench NAME [--json]; NAME is one of {', '.join(known)}", file=sys.stderr)
        raise SystemExit(0 if arguments == ["--help"] else 2)
    name, *rest = arguments
    module = importlib.import_module(f"tests.bench.{name}")
    command = typer.Typer(add_completion=False)
    command.command(name)(module.main)
    command(args=rest, prog_name=f"python -m tests.bench {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
