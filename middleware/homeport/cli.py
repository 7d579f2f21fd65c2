"""The ``homeport`` command."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local values could show a secret
    help="Sends every OpenAI Responses follow-up to the upstream that holds its state, or refuses it before routing.",
)


@app.callback(invoke_without_command=True)
def main(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"homeport {version('homeport')}")
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8700,
    uds: Annotated[Path | None, typer.Option(help="Listen on this unix socket instead.")] = None,
    workers: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 1,
) -> None:
    """Run the gateway in front of the upstreams of HOMEPORT_UPSTREAMS or HOMEPORT_CONFIG_FILE.

    SIGTERM and SIGINT are its ordinary end. Exit code 2 for settings that do not do, 3 if it could not listen.
    """
    gateway = _extra("homeport_gateway.serve", "gateway")
    try:
        gateway.serve(host=host, port=port, uds=uds, workers=workers)
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except gateway.CannotListen as error:
        _fail(str(error), 3)


@app.command()
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    postgres: Annotated[
        bool, typer.Option("--postgres", help="Share an embedded PostgreSQL instead of SQLite.")
    ] = False,
) -> None:
    """Chains of turns over two replicas and two upstreams, without homeport and with it.

    Exit code 0 only if every follow-up reached its owner.
    """
    _extra("openai", "demo")
    _extra("aiohttp", "demo")
    if json_file is not None:  # now, not after the work
        try:
            json_file.open("a").close()
        except OSError as error:
            _fail(f"cannot write {json_file}: {error.strerror}")
    runner = importlib.import_module("homeport.demo.runner")
    try:
        figures = runner.run(postgres=postgres, echo=typer.echo)
    except RuntimeError as error:  # one of its processes did not start, and this is what it wrote
        _fail(str(error), 1)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    raise typer.Exit(0 if figures["passed"] else 1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def litellm(context: typer.Context) -> None:
    """Run the stock litellm command with homeport in it: every argument is litellm's, --help too.

    The same as setting LITELLM_WORKER_STARTUP_HOOKS=homeport_litellm:install. Exit code 2 for settings that do not do.
    """
    command = _extra("homeport_litellm.command", "litellm")
    try:
        command.run(context.args)
    except ModuleNotFoundError as error:
        _fail(_missing(error, "litellm"))
    except ValueError as error:
        _fail(str(error))


@app.command()
def register(
    kind: Annotated[str, typer.Argument(help="response, conversation or container.")],
    opaque_id: Annotated[str, typer.Argument(metavar="ID", help="The id at the upstream.")],
    upstream: Annotated[str, typer.Option(help="An upstream of HOMEPORT_UPSTREAMS; with --litellm a deployment.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="name=value: a tenant header, credential=, or team=, user=, key= in LiteLLM."),
    ] = None,
    litellm_config: Annotated[
        Path | None, typer.Option("--litellm", help="The configuration of a LiteLLM proxy.")
    ] = None,
) -> None:
    """Record who owns state that was not made through homeport, so that it can be continued.

    A value of - is read from standard input. Exit code 0 when it is recorded, or was; 1 if it is somebody else's, 2 for
    arguments or settings that do not do, 3 if the store does not take it.
    """
    work = importlib.import_module("homeport.commands.register")
    try:
        work.run(kind, _value(opaque_id), upstream, _pairs(tenant or []), litellm_config)
    except ModuleNotFoundError as error:
        _fail(_missing(error, "litellm"))
    except ValueError as error:
        _fail(str(error))
    except work.Refused as error:
        _fail(str(error), error.code)
    typer.echo(f"homeport: the {kind} is registered at {upstream}")


@app.command()
def reencrypt(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Seal all stored content with the first of HOMEPORT_ENCRYPTION_KEYS, while replicas run.

    It may be stopped and run again. Exit code 0 when no other key is needed any more, 1 if some content still needs
    one, 2 for settings that do not do, 3 if the store does not answer.
    """
    work = importlib.import_module("homeport.commands.reencrypt")
    homeport = importlib.import_module("homeport")
    try:
        with _progress() as progress:
            report = asyncio.run(work.reencrypt(homeport.Settings(), progress))
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except homeport.StoreUnavailable:
        _fail("the store does not answer; what was done stays so, and it may be run again", 3)
    typer.echo(json.dumps(report.counts) if as_json else "\n".join(f"homeport: {line}" for line in report.lines()))
    raise typer.Exit(0 if report.complete else 1)


@app.command()
def check(
    url: Annotated[str, typer.Option(help="Where the API is served, with or without /v1.")],
    key_env: Annotated[str | None, typer.Option(help="The environment variable that holds a key for it.")] = None,
) -> None:
    """Ask for a response that nobody has made: homeport must answer it itself.

    Exit code 0 if it does, 1 if something else answered, 2 for arguments that do not do, 3 if nothing did.
    """
    work = importlib.import_module("homeport.commands.check")
    try:
        verdict = work.ask(url, key_env)
    except ValueError as error:
        _fail(str(error))
    typer.echo(f"homeport: {verdict.text}", err=verdict.code != 0)
    raise typer.Exit(verdict.code)


@app.command("check-request")
def check_request(
    file: Annotated[Path, typer.Argument(help="A raw HTTP/1.1 request; - reads standard input.")],
    peer: Annotated[str, typer.Option(help="The address that it comes from, or unix.")] = "127.0.0.1",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
    show_ids: Annotated[bool, typer.Option("--show-ids", help="Show the ids that it names.")] = False,
) -> None:
    """Say what homeport sees in a request under the settings of this environment, without its store.

    Exit code 0 if it would pass, or be looked up; 1 if it would be refused, 2 for a file or settings that do not do.
    """
    work = importlib.import_module("homeport.commands.check_request")
    settings = importlib.import_module("homeport.settings")
    try:
        data = typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
        report = work.examine(work.parse(data), settings.Settings(), peer=peer, show_ids=show_ids)
    except OSError as error:
        _fail(f"cannot read {file}: {error.strerror}")
    except ValueError as error:
        _fail(str(error))
    typer.echo(json.dumps(report.seen, indent=2) if as_json else "\n".join(report.lines()))
    raise typer.Exit(1 if report.refused else 0)


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None] | None]:
    """What shows, on a terminal alone, how much is done and a line about it; it is gone in the end."""
    if not typer.get_text_stream("stderr").isatty():
        yield None
        return
    try:
        yield lambda done, line: typer.echo(f"\r{done:4.0%}: {line}", nl=False, err=True)
    finally:
        typer.echo("\r\x1b[K", nl=False, err=True)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in pairs:
            _fail("a tenant is given as name=value, each name once")
        pairs[name.lower()] = _value(value)
    return pairs


def _value(text: str) -> str:
    return typer.get_text_stream("stdin").readline().rstrip("\n") if text == "-" else text


def _extra(module: str, extra: str):  # type: ignore[no-untyped-def]  # a module's type cannot be told
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        _fail(_missing(error, extra))


def _missing(error: ModuleNotFoundError, extra: str) -> str:
    """What to say of it; ``extra`` is where it comes from, unless it says so itself."""
    said = str(error)
    return said if "pip install" in said else f"this command needs {error.name}: pip install 'homeport[{extra}]'"


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"homeport: {message}", err=True)
    raise typer.Exit(code)
