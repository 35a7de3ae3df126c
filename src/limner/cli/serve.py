"""`limner serve`: draw for other programs, and on a page in the browser."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from limner import pretrained
from limner.cli.arguments import parse
from limner.errors import UserError
from limner.validation import Range, Validated

_DRAIN_SECONDS = 30  # that running requests have after SIGTERM or Ctrl-C


@dataclass(frozen=True, kw_only=True)
class Serve(Validated):
    """Serve models by HTTP: OpenAI's Images API at /v1, and a page to draw on at /.

    By default only this machine can reach the server. Other addresses need --keys.
    """

    model: Annotated[tuple[str, ...], arg(metavar="NAME|FOLDER ...")] = (pretrained.DEFAULT,)
    """Bundled models or folders that `limner train` wrote; requests choose by name, the first is the default."""
    rerank: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """A CLIP model of `limner convert clip`, whose cosine ranks the candidates in place of the models' own scores."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """The port to listen on; 0 takes a free one."""
    keys: Annotated[Path | None, arg(metavar="FILE")] = None
    """A file with a line for each API key, from --new-key."""
    new_key: Annotated[str | None, arg(metavar="NAME")] = None
    """Print a new API key and the line of --keys for it, and exit."""
    sign: Annotated[tuple[Path, Path] | None, arg(metavar="CHAIN KEY")] = None
    """Sign pictures by C2PA: PEM files of the certificates, the own one first, and of the private key."""
    max_requests: Annotated[int, Range(1, 2**16)] = 64
    """Requests of a model that may wait and run at the same time; more get status 429."""
    timeout: Annotated[float, Range(1, 86_400)] = 600
    """Seconds after which a request ends with status 504."""


def main(argv: Sequence[str]) -> None:
    """Serve models until the process is interrupted."""
    options = parse(Serve, argv, "limner serve")
    try:
        import python_multipart  # noqa: F401  (FastAPI reads forms with it)
        import uvicorn  # noqa: F401

        from limner.serve.security import hash_key, new_key, read_keys
    except ModuleNotFoundError as error:
        raise UserError(f"limner serve needs {error.name}: run pip install 'limner[serve]'") from None
    if options.new_key is not None:
        key = new_key()
        print(f"{key}\n{options.new_key} {hash_key(key)}")
        return
    keys = None if options.keys is None else read_keys(options.keys)
    if keys is None and not _is_loopback(options.host):
        raise UserError(
            f"--host {options.host} is open to other machines and needs --keys FILE, made with --new-key NAME"
        )
    names = [Path(name).name or name for name in options.model]
    if not names or len(set(names)) < len(names):
        raise UserError("--model needs one model or more, whose folders have different names")
    sign = None if options.sign is None else _signer(*options.sign)
    from limner.pipeline import load
    from limner.serve.app import create_app

    warnings.filterwarnings("ignore", "a caption of")  # Python would keep each; clients get one in the answer
    pipes = {name: load(model, rerank=options.rerank) for name, model in zip(names, options.model, strict=True)}
    app = create_app(pipes, keys=keys, max_requests=options.max_requests, timeout=options.timeout, sign=sign)
    run_server(app, options.host, options.port)


def _signer(certificates: Path, key: Path) -> Any:
    try:
        from limner.serve.signing import Signer
    except ModuleNotFoundError as error:
        raise UserError(f"--sign needs {error.name}: run pip install 'limner[sign]'") from None
    return Signer(certificates, key)


def run_server(app: Any, host: str, port: int) -> None:
    """Serve an application until the process is interrupted. Exit with code 2 if it cannot start.

    Raises `UserError` if the address is in use, or not an address of this machine.
    """
    import uvicorn

    try:  # uvicorn would end the process with another code
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if os.name == "posix":  # the port of a server that has just ended is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port} ({error.strerror}): choose another --host or --port; --port 0 takes "
            "a free one"
        ) from None
    config = uvicorn.Config(
        app, host, port, log_config=_LOG, access_log=False, server_header=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run()
    if not server.started:
        sys.exit(2)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {name: {"handlers": ["stderr"], "level": "INFO"} for name in ("uvicorn", "limner.serve")},
}
