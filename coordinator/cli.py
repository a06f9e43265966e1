"""The `coordinator` command: reads words and environment, says what comes out, and gives the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # we never fork; gRPC would print lines of its own
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong on a line is said by us

# The commands import what they need when they run: `--help` takes no second.
from coordinator.errors import KILLED, CoordinatorError, UsageError
from coordinator.parent import ORPHANED

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # the last line of an error is its cause, not the edge of a box
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Makes, serves and operates a Barnraise run.",
)

DataOption = Annotated[Path, typer.Option("--data", metavar="DIR", help="The run's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the run, such as work.h=100.")
]
HERE = Path()


@app.callback()
def _all(
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    del verbose  # taken out by `run` already


@app.command()
def init(
    data: DataOption,
    preset: Annotated[str | None, typer.Option(help="tiny, 150M, 1B or 7B.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="RUN.toml", help="A file of settings.")] = None,
    sets: SetOption = None,
    data_path: Annotated[str | None, typer.Option(metavar="TEXT", help="A file or folder of text.")] = None,
) -> None:
    """Make a run: keys, RunSpec, packed data, first state. Prints the run's id."""
    from coordinator import tools
    from coordinator.config import load
    from coordinator.display import say_plainly
    from coordinator.founding import found

    words = list(sets or [])
    if data_path is not None:
        words.append(f"data.path={Path(data_path).absolute()}")
    wish = load(preset, config, words)

    async def run_tool(path: Path, to: Path) -> Any:
        return await tools.init(path, to, say_plainly)

    run, spec = _run(found(data.absolute(), wish, run_tool, datetime.now(UTC)))
    say_plainly(
        f"a model of {spec.model.n_parameters:,} parameters, {spec.data.n_train_sequences:,} sequences to train on; "
        f"serve it with: coordinator serve --data {data}"
    )
    print(run)


@app.command()
def serve(
    data: DataOption,
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="First contact and page. [0.0.0.0:8470]")] = "",
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The members' lines. [0.0.0.0:8471]")] = "",
    dht: Annotated[str, typer.Option(metavar="HOST:PORT", help="The observer's DHT. [0.0.0.0:8472]")] = "",
    observer: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The observer, which gives the first state. [0.0.0.0:8473]")
    ] = "",
    advertise: Annotated[str, typer.Option(metavar="HOST", help="The host that others reach this machine by.")] = "",
    database: Annotated[str, typer.Option(metavar="URL", help="Instead of the SQLite file in DIR.")] = "",
    standby: Annotated[bool, typer.Option("--standby", help="Wait while another leads; then take over.")] = False,
    lease: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS", help="Silent for longer, one loses the lead. [15]")
    ] = None,
    parent_pid: Annotated[int, typer.Option(hidden=True)] = 0,
    clock_offset: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Serve a run until SIGINT or SIGTERM. Prints the invite and the page's address."""
    if parent_pid:
        from coordinator.parent import end_with

        end_with(parent_pid)
    from coordinator.app import Outside
    from coordinator.app import serve as serve_run
    from coordinator.display import ServingDisplay
    from coordinator.lead import LEASE_S
    from coordinator.places import ServeOptions
    from coordinator.watching import watched

    options = ServeOptions(
        data.absolute(), http, listen, dht, observer, advertise, database, standby=standby, lease_s=lease or LEASE_S,
        clock_offset_s=clock_offset,
    )  # fmt: skip
    shown = ServingDisplay()
    outside = Outside(watch=lambda bulletin, driver: watched(bulletin, driver, shown))
    _run(serve_run(options, shown.say, lambda text: print(text, flush=True), outside))


@app.command()
def status(data: DataOption = HERE, as_json: JsonOption = False) -> None:
    """Show where the run is."""
    from rich.console import Console

    from coordinator import display, operating

    found = _run(operating.status(data.absolute()))
    if as_json:
        print(json.dumps(found))
        return
    print(display.status_line(found))
    if found["members"]:
        Console().print(display.member_table(found))


@app.command()
def ledger(
    data: DataOption = HERE,
    as_json: Annotated[bool, typer.Option("--json", help="Print each commit as a JSON document on a line.")] = False,
) -> None:
    """Show the commits, oldest first; with --json one line each."""
    from rich.console import Console

    from coordinator import display, operating

    rows = _run(operating.ledger(data.absolute()))
    if as_json:
        for row in rows:
            print(json.dumps(row, separators=(",", ":")))
        return
    Console().print(display.round_table(rows))


KeyOption = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="Sign with this key instead of the folder's.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the signed order here; give it later, elsewhere.")
]
NumberOption = Annotated[int, typer.Option("--number", min=0, help="The order's number; 0: the next one.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="What members and the ledger are told.")]


@app.command()
def pause(
    data: DataOption = HERE,
    reason: ReasonOption = "",
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """Have the run wait, under any leader, until it is resumed."""
    _command("pause", data, key, out, number, reason=reason)


@app.command()
def resume(
    data: DataOption = HERE,
    reason: ReasonOption = "",
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """Have a run go on that was paused, or that is to end."""
    _command("resume", data, key, out, number, reason=reason)


@app.command()
def end(
    data: DataOption = HERE,
    after: Annotated[int, typer.Option(min=0, metavar="ROUND", help="The last round; 0: at once.")] = 0,
    reason: ReasonOption = "",
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """End the run: every member stops with its state, for this reason."""
    _command("end", data, key, out, number, reason=reason, round_=after)


@app.command()
def amend(
    data: DataOption = HERE,
    sets: SetOption = None,
    begins: Annotated[
        int, typer.Option("--from", min=0, metavar="ROUND", help="The first round under it; 0: the next one.")
    ] = 0,
    reason: ReasonOption = "",
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """Change settings of the run from a round on, such as --set inner.lr=0.001."""
    _command("amend", data, key, out, number, reason=reason, round_=begins, sets=tuple(sets or ()))


@app.command()
def rollback(
    round_: Annotated[int, typer.Argument(min=0, metavar="ROUND", help="Whose state the run goes back to.")],
    data: DataOption = HERE,
    reason: ReasonOption = "",
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """Go back to the state after a round; what came after it is orphaned."""
    _command("rollback", data, key, out, number, reason=reason, round_=round_)


@app.command()
def evict(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A peer id, or at least its last six characters.")],
    data: DataOption = HERE,
    reason: ReasonOption = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let an evicted peer come back.")] = False,
    key: KeyOption = None,
    out: OutOption = None,
    number: NumberOption = 0,
) -> None:
    """Put a peer out of the run: no seat, no vote, and nobody answers it any more."""
    _command("resume" if undo else "evict", data, key, out, number, reason=reason, peer=peer)


@app.command()
def order(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --out wrote.")], data: DataOption = HERE
) -> None:
    """Give an order that was signed elsewhere."""
    from coordinator import commanding

    print(_run(commanding.hand_over(data.absolute(), file.absolute())))


def _command(
    kind: str,
    data: Path,
    key: Path | None,
    out: Path | None,
    number: int,
    *,
    reason: str,
    peer: str = "",
    round_: int = 0,
    sets: tuple[str, ...] = (),
) -> None:
    from coordinator.commanding import Handling, Wish, command
    from protos.orders import Kind

    handling = Handling(key and key.absolute(), out and out.absolute(), number)
    print(_run(command(data.absolute(), Wish(Kind(kind), peer, round_, reason, sets), handling)))


@app.command()
def invite(
    data: DataOption = HERE,
    uses: Annotated[int, typer.Option(min=0, help="How many peers may use it; 0: any number.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="From now, such as 12h or 7d.")] = "7d",
) -> None:
    """Print a fresh invite with a token, for runs by invitation."""
    from coordinator import operating

    print(_run(operating.invite(data.absolute(), uses=uses, expires_s=operating.parse_duration_s(expires))))


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to write.")],
    data: DataOption = HERE,
) -> None:
    """Write the newest state as a folder that transformers loads."""
    from coordinator import operating
    from coordinator.display import say_plainly

    found = _run(operating.export(data.absolute(), to.absolute(), say_plainly))
    print(found["export"])


@app.command("eval")
def evaluate(data: DataOption = HERE, as_json: JsonOption = False) -> None:
    """Compute the validation loss of the newest state."""
    from coordinator import operating
    from coordinator.display import say_plainly

    found = _run(operating.evaluate(data.absolute(), say_plainly))
    if as_json:
        print(json.dumps(found))
    else:
        print(f"validation loss {found['val_loss']:.4f} over {found['n_tokens']:,} tokens, state {found['state']}")


@app.command()
def simulate(
    nodes: Annotated[int, typer.Option(min=1, max=64)] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Committed rounds with contributions.")] = 8,
    model: Annotated[str, typer.Option(metavar="PRESET", help="tiny, 150M, 1B or 7B.")] = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, metavar="H", help="Inner steps of a round.")] = None,
    rule: Annotated[str | None, typer.Option(metavar="R", help="Such as median, arc+nnm+trimmed_mean.")] = None,
    f: Annotated[int | None, typer.Option(min=0, metavar="F", help="Byzantine contributions, at most.")] = None,
    codec: Annotated[str | None, typer.Option(metavar="C", help="int8, fp16, fp32, int4, topk.")] = None,
    kill_every: Annotated[int, typer.Option(min=0, metavar="K", help="Kill a node every K rounds.")] = 0,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep everything here, and go on here.")] = None,
    data_path: Annotated[str | None, typer.Option(metavar="TEXT", help="A file or folder of text.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run everything on this machine: a coordinator and several nodes, real processes and sockets, a real corpus."""
    from coordinator import display
    from coordinator.folder import RunFolder
    from coordinator.simulate import SimulateOptions, document, simulate, tidy

    options = SimulateOptions(
        nodes, rounds, model, steps, rule, f, codec, kill_every, data_path, seed, tuple(sets or ())
    )
    place = data.absolute() if data is not None else Path(tempfile.mkdtemp(prefix="barnraise-"))
    shown = display.open_display()
    try:
        result = _run(simulate(options, place, shown))
    except BaseException:
        shown.close()
        if place.exists() and any(place.iterdir()):
            display.say_plainly(f"what there is of the run is in {place}")
        raise
    shown.close()
    if data is None:
        tidy(RunFolder(place))
    if as_json:
        print(document(result))
    else:
        display.print_summary(result, place, kept=data is not None)


class _Asked(BaseException):
    """The user asked us to stop, and we have."""


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The one event loop. SIGINT and SIGTERM cancel the work, which cleans up; the second one ends the process."""

    async def main() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        asked = False

        def signalled() -> None:
            nonlocal asked
            if asked:
                os._exit(KILLED)
            asked = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled)

        def orphaned() -> None:
            if not asked:
                signalled()

        loop.add_signal_handler(ORPHANED, orphaned)
        try:
            return await task
        except asyncio.CancelledError:
            if asked:
                raise _Asked from None
            raise

    return uvloop.run(main())


def main() -> None:
    """The command's entry. Ends the process without taking the interpreter down piece by piece.

    Everything is closed and on disk by then, and gRPC's own teardown takes seconds (tried: 1 to 4).
    """
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):  # whoever read our output may have left
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def run(words: Sequence[str]) -> int:
    """The exit code of the command in these words; every error's last line is its cause and remedy."""
    plain = [word for word in words if word not in ("-v", "--verbose")]
    verbose = len(plain) != len(words)
    try:
        code = app(args=plain or ["--help"], prog_name="coordinator", standalone_mode=False)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0
    except _Asked:
        print("stopped as asked", file=sys.stderr)
        return 0
    except CoordinatorError as error:
        if verbose:
            traceback.print_exc()
        hint = f"; see coordinator {plain[0]} --help" if isinstance(error, UsageError) and not error.remedy else ""
        print(f"coordinator: {error}{hint}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception as error:
        if verbose:
            traceback.print_exc()
        explain = getattr(error, "format_message", None)  # wrong words, as typer's own copy of click has them
        if explain is not None:
            command = next((word for word in plain if word in _commands()), "")
            see = f"coordinator {command} --help" if command else "coordinator --help"
            print(f"coordinator: {str(explain()).rstrip('.')}; see {see}", file=sys.stderr)
            return int(getattr(error, "exit_code", 2))
        print(
            f"coordinator: a fault of ours: {type(error).__name__}: {error}; run it with -v and report what it shows",
            file=sys.stderr,
        )
        return 1
    return code if isinstance(code, int) else 0


def _commands() -> set[str]:
    named = (each.name or (each.callback.__name__ if each.callback else "") for each in app.registered_commands)
    return {name.replace("_", "-") for name in named}
