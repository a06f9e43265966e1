"""The `node` command: reads words and environment, says what comes out, and gives the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Optional

import typer

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # p2pd is started after gRPC, by spawning: nothing to protect
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong between nodes is said by us
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else each thread spins for its siblings, whoever needs the core
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the RunSpec has all that a model needs

from node.errors import KILLED, NODE_JS_EXIT_CODE, ConfigError, MachineError, NodeError

app = typer.Typer(
    name="node",
    help="Take part in a Barnraise run with this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
identity_app = typer.Typer(help="The contributor's key.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(identity_app, name="identity")

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3}(,[0-9]{1,3})*)?")

Data = Annotated[Optional[Path], typer.Option("--data", help="This node's folder: key, state, data.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show a traceback when something fails.")]
ParentPid = Annotated[int, typer.Option("--parent-pid", hidden=True)]
Listen = Annotated[str, typer.Option(help="HOST:PORT for other nodes; port 0: any free one.")]
Dht = Annotated[str, typer.Option("--dht", help="HOST:PORT for the DHT; port 0: any free one.")]
ClockOffset = Annotated[float, typer.Option(hidden=True, help="Seconds by which this machine's clocks are off.")]
Advertise = Annotated[str, typer.Option(help="HOST or HOST:PORT that others reach this node at; several with commas.")]


def main() -> None:
    """Entry point. Called like Node.js, whose command has our name, it says who it is."""
    words = sys.argv[1:]
    if words and (words[0] in ("-e", "-p", "--eval", "--print", "-i") or words[0].endswith((".js", ".mjs", ".cjs"))):
        print(
            "this is Barnraise's `node`, not Node.js, which this environment hides; "
            "leave the environment, or call it as barnraise-node",
            file=sys.stderr,
        )
        raise SystemExit(NODE_JS_EXIT_CODE)
    code = run(words)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read our output may have left
            stream.flush()
    # Everything is closed and on disk by now, and gRPC's own teardown takes seconds (tried: 1 to 4).
    os._exit(code)


def run(words: list[str]) -> int:
    """The exit code of the command in these words; every error's last line is its cause and remedy."""
    try:
        code = app(args=words or ["--help"], prog_name="node", standalone_mode=False)
    except SystemExit as left:
        code = left.code
    except Exception as error:
        explain = getattr(error, "format_message", None)  # wrong words, as typer's own copy of click has them
        if explain is None:
            raise
        command = next((word for word in words if not word.startswith("-")), "")
        known = any(
            command == (each.name or each.callback.__name__) for each in app.registered_commands if each.callback
        )
        print(f"{str(explain()).rstrip('.')}; see node {f'{command} ' if known else ''}--help", file=sys.stderr)
        code = int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


@app.command()
def join(
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="The line that the coordinator printed.")],
    data: Data = None,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of the trainer; 0: all cores.")] = 0,
    listen: Listen = "0.0.0.0:0",
    dht: Dht = "0.0.0.0:0",
    advertise: Advertise = "",
    rounds: Annotated[Optional[int], typer.Option(help="Leave after so many rounds that counted.")] = None,
    name: Annotated[str, typer.Option(help="What others see this node called.")] = "",
    max_up: Annotated[str, typer.Option(metavar="RATE", help="Send at most so much: 5M (bytes/s), 20Mbit.")] = "",
    max_down: Annotated[str, typer.Option(metavar="RATE", help="Receive at most so much: 5M (bytes/s), 20Mbit.")] = "",
    data_cache: Annotated[
        str, typer.Option(metavar="SIZE", help="Keep at most so much training data (8GiB): 500M, 2TiB; 0: only leases.")
    ] = "",
    verbose: Verbose = False,
    parent_pid: ParentPid = 0,
    clock_offset: ClockOffset = 0.0,
) -> None:
    """Take part until told to leave, or for N rounds."""

    def begin() -> Coroutine[Any, Any, str]:
        from node.config import DATA_CACHE_BYTES, NodeOptions, read_invite, read_rate, read_size

        _check_device(device)
        parsed = read_invite(invite)  # before anything large is loaded
        options = NodeOptions(
            invite=parsed,
            data=data or default_folder(parsed.run),
            threads=threads or os.cpu_count() or 1,
            listen=listen,
            dht=dht,
            advertise=advertise,
            rounds=rounds,
            name=name,
            max_up=read_rate(max_up, "--max-up") if max_up else None,
            max_down=read_rate(max_down, "--max-down") if max_down else None,
            data_cache=read_size(data_cache, "--data-cache") if data_cache else DATA_CACHE_BYTES,
        )
        from node.app import join as run_node
        from node.outside import clocks_off_by

        return run_node(options, clocks_off_by(clock_offset))

    print(_run_node(begin, verbose, parent_pid), file=sys.stderr)


@app.command(hidden=True)
def observe(
    invite: str,
    run_dir: Annotated[Path, typer.Option("--run-dir")],
    data: Annotated[Path, typer.Option("--data")],
    listen: Listen = "0.0.0.0:0",
    dht: Dht = "0.0.0.0:0",
    advertise: Advertise = "",
    threads: int = 1,
    verbose: Verbose = False,
    parent_pid: ParentPid = 0,
) -> None:
    """Follow a run without a seat; started by `coordinator serve`."""

    def begin() -> Coroutine[Any, Any, str]:
        from node.app import join as run_node
        from node.config import NodeOptions, read_invite

        options = NodeOptions(
            invite=read_invite(invite),
            data=data,
            threads=threads,
            listen=listen,
            dht=dht,
            advertise=advertise,
            name="observer",
            run_dir=run_dir,
        )
        return run_node(options)

    print(_run_node(begin, verbose, parent_pid), file=sys.stderr)


@app.command()
def status(data: Data = None, as_json: Json = False, verbose: Verbose = False) -> None:
    """What the node in this folder is doing, and whether it counts."""

    def begin() -> Coroutine[Any, Any, dict[str, Any]]:
        from node.control import ask

        return ask(_folder(data), "status")

    answer = _run(begin, verbose)
    if as_json:
        print(json.dumps(answer))
        return
    for key, value in answer.items():
        print(f"{key:16} {value if not isinstance(value, dict | list) else json.dumps(value)}")


@app.command()
def pause(data: Data = None, verbose: Verbose = False) -> None:
    """Stop training until `node resume`. Nobody waits: a round that ends meanwhile goes on without this node."""
    _tell("pause", data, verbose)


@app.command()
def resume(data: Data = None, verbose: Verbose = False) -> None:
    """Go on after `node pause`."""
    _tell("resume", data, verbose)


@app.command()
def leave(data: Data = None, verbose: Verbose = False) -> None:
    """Give the seat back and end the node."""
    _tell("leave", data, verbose)


@identity_app.command("show")
def identity_show(data: Data = None, verbose: Verbose = False) -> None:
    """The peer id of this folder's key, and where the key is."""

    def begin() -> Coroutine[Any, Any, str]:
        from node.app import show_identity

        return show_identity(_folder(data))

    print(_run(begin, verbose))


@identity_app.command("export")
def identity_export(file: Path, data: Data = None, verbose: Verbose = False) -> None:
    """Copy the key to a file: whoever has it is this contributor."""

    def begin() -> Coroutine[Any, Any, str]:
        from node.app import export_identity

        return export_identity(_folder(data), file)

    print(_run(begin, verbose))


@identity_app.command("import")
def identity_import(file: Path, data: Data = None, verbose: Verbose = False) -> None:
    """Take over a key that was exported; a folder's own key is never replaced."""

    def begin() -> Coroutine[Any, Any, str]:
        from node.app import import_identity

        return import_identity(_folder(data), file)

    print(_run(begin, verbose))


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def tool(context: typer.Context, name: str) -> None:
    """Make a run, evaluate or export a state: `node tool NAME --KEY VALUE …`; started by the coordinator."""
    words = list(context.args)
    pairs = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=False))
    parent_pid = int(pairs.pop("parent-pid", "0"))

    def begin() -> Coroutine[Any, Any, str]:
        from node.tool import ToolError, main_tool

        async def work() -> str:
            try:
                return await asyncio.to_thread(main_tool, name, pairs, n_threads=os.cpu_count() or 1)
            except ToolError as error:
                raise ConfigError(str(error), "change what was asked for, and try again") from error

        return work()

    print(_run(begin, False, parent_pid))


def default_folder(run: str) -> Path:
    """Where a node of this run keeps its things when nothing is said; it does not depend on where one stands."""
    return _home() / str(run)[-12:]


def _home() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "barnraise"


def _folder(data: Path | None) -> Path:
    """The folder that is named, or the only one there is. Raises ConfigError."""
    if data is not None:
        return data
    folders = sorted(path for path in _home().glob("*") if path.is_dir()) if _home().is_dir() else []
    if len(folders) == 1:
        return folders[0]
    found = ", ".join(str(folder) for folder in folders) or f"none in {_home()}"
    raise ConfigError(f"which node is meant is not clear: {found}", "name its folder with --data")


def _tell(word: str, data: Path | None, verbose: bool) -> None:
    def begin() -> Coroutine[Any, Any, dict[str, Any]]:
        from node.control import ask

        return ask(_folder(data), word)

    print(_run(begin, verbose).get("said", ""))


def _place(error: BaseException) -> str:
    """Where it was raised, as file:line: an assertion that fails often says nothing else."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in frames[:-4:-1])


def _check_device(device: str) -> None:
    if device in ("auto", "cpu"):
        return
    if _DEVICE.fullmatch(device) is None:
        raise ConfigError(f"--device {device} is no device", "use auto, cpu, mps, cuda or cuda:0,1, or leave it out")
    raise MachineError(
        f"--device {device}: this version trains on the CPU alone", "use --device cpu, or leave the option out"
    )


class _AskedEarly(BaseException):
    """Told to go while the program is still being loaded, which takes seconds."""


@contextlib.contextmanager
def _leaves_on_signals() -> Iterator[list[int]]:
    """Until the node has handlers of its own: the first of its owner's signals raises, the second one ends at once.

    Gives those that came: a module that is being loaded may catch whatever is raised.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def told(number: int, _frame: FrameType | None) -> None:
        if came:
            if number == signal.SIGHUP:  # a window that closes tells twice
                return
            os._exit(KILLED)
        came.append(number)
        raise _AskedEarly

    owners = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, told) for each in owners}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)


def _run_node(begin: Any, verbose: bool, parent_pid: int) -> Any:
    """As `_run`, for what is to leave cleanly when it is told to, at any time."""
    try:
        with _leaves_on_signals() as came:

            def unless_told() -> Any:
                coroutine = begin()
                if came:
                    coroutine.close()
                    raise _AskedEarly
                return coroutine

            return _run(unless_told, verbose, parent_pid)
    except _AskedEarly:
        return "left on a signal, before this node took part"


def _run(begin: Any, verbose: bool, parent_pid: int = 0) -> Any:
    """Run a coroutine to its end; what fails is one line with cause and remedy, and its exit code."""
    import uvloop

    if parent_pid:
        from node.parent import end_with

        end_with(parent_pid)
    try:
        return uvloop.run(begin())
    except NodeError as error:
        code, text = error.exit_code, str(error)
        if verbose:
            traceback.print_exc()
    except KeyboardInterrupt:
        code, text = KILLED, "interrupted"
    except Exception as error:
        code, text = 1, f"a fault of ours: {error!r} in {_place(error)}; run again with -v and report it"
        if verbose:
            traceback.print_exc()
    print(text, file=sys.stderr)
    raise typer.Exit(code)
