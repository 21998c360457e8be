"""Examples:

sol gateway keys create --config gateway.yaml shop-1 --tenant shop --limits small
sol gateway keys list --config gateway.yaml
sol gateway keys revoke --config gateway.yaml shop-1
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sol.errors import ConfigError

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig
    from sol.gateway.limits.database import Database
    from sol.gateway.limits.keys import StoredKey

_Result = TypeVar("_Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument(
            "--config", type=Path, default=argparse.SUPPRESS, metavar="FILE",
            help="gateway.yaml, whose database holds the keys",
        )  # fmt: skip
        command.set_defaults(run=run)
        return command

    create = add("create", _create, "make a key and print it; this is the one time that it can be read")
    create.add_argument("id", metavar="ID", help="names the key in logs, records and for `revoke`; one word")
    create.add_argument("--tenant", default="default", help="whose it is (default: %(default)s)")
    create.add_argument("--limits", metavar="POLICY", help="one of limits.policies; without it, limits.default_policy")
    create.add_argument(
        "--model", action="append", dest="models", metavar="NAME",
        help="a model that it may use, may be repeated; without it, all",
    )  # fmt: skip
    create.add_argument(
        "--class", action="append", dest="classes", default=[], metavar="NAME",
        help="a class that it may ask for beside its default and less urgent ones, may be repeated",
    )  # fmt: skip
    create.add_argument("--default-class", metavar="NAME", help="the class of its requests that ask for none")
    create.add_argument(
        "--expires", type=_moment, metavar="TIME", help="when it ends to be good: 2030-01-31, or 2030-01-31T12:00+00:00"
    )
    create.add_argument(
        "--metadata", action="append", type=_pair, default=[], metavar="NAME=VALUE", help="kept with it; repeatable"
    )
    listing = add("list", _list, "say which keys there are, never the keys themselves")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    revoke = add("revoke", _revoke, "make a key useless, at every gateway within database.key_refresh_seconds")
    revoke.add_argument("id", metavar="ID")


def _create(args: argparse.Namespace) -> int:
    from sol.gateway.limits.keys import create_key

    config = _config(args)
    _check_names(config, args)

    async def create(database: Database) -> str:
        return await create_key(
            database,
            id=args.id,
            tenant=args.tenant,
            models=args.models,
            classes=args.classes,
            default_class=args.default_class,
            limits=args.limits,
            metadata=dict(args.metadata),
            expires_at=args.expires,
        )

    # Nothing else goes to standard output: scripts take the key from there.
    print(_with_database(config, create))
    return 0


def _list(args: argparse.Namespace) -> int:
    from sol.gateway.limits.keys import list_keys

    keys = _with_database(_config(args), list_keys)
    if args.json:
        for key in keys:
            print(json.dumps(_described(key)))
        return 0
    rows = [("ID", "TENANT", "LIMITS", "MODELS", "CLASSES", "CREATED", "STATE"), *map(_row, keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from sol.gateway.limits.keys import revoke_key

    if not _with_database(_config(args), lambda database: revoke_key(database, args.id)):
        raise ConfigError(f"there is no key {args.id!r:.200} that is not revoked; `keys list` has them all", param="id")
    print(f"the key {args.id} is revoked")
    return 0


def _config(args: argparse.Namespace) -> GatewayConfig:
    from sol.gateway.config import read_config

    if args.config is None:
        raise ConfigError("--config is missing: name the gateway.yaml whose database holds the keys", param="config")
    return read_config(args.config)


def _check_names(config: GatewayConfig, args: argparse.Namespace) -> None:
    """What is mistyped here would be a key that is refused, or that nobody limits. Raises `ConfigError`."""
    from sol.gateway.queue.config import CLASSES

    def check(flag: str, names: Sequence[str | None], known: Sequence[str]) -> None:
        for name in names:
            if name is not None and name not in known:
                raise ConfigError(
                    f"--{flag}: there is no {name!r:.200} in {args.config}; there are {', '.join(known) or 'none'}",
                    param=flag,
                )

    if not args.tenant.strip():
        raise ConfigError("--tenant is empty; name whose key it is", param="tenant")
    check("limits", [args.limits], sorted(config.limits.policies))
    check("model", args.models or (), [model.name for model in config.models])
    check("class", args.classes, CLASSES)
    check("default-class", [args.default_class], CLASSES)


def _with_database(config: GatewayConfig, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
    """Raises `ConfigError` where the file has no database, and `DatabaseAwayError`."""
    options = config.database
    if options is None:
        raise ConfigError(
            "the file has no database to keep keys in: add the section `database` with its url, or write keys into "
            "`keys` by their hash",
            param="database",
        )

    async def with_it() -> _Result:
        from sol.gateway.limits.database import Database

        database = Database(options)
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(with_it())


def _described(key: StoredKey) -> dict[str, object]:
    principal = key.principal
    return {
        "id": principal.key_id,
        "tenant": principal.tenant,
        "limits": principal.limits,
        "models": None if principal.models is None else sorted(principal.models),
        "classes": list(principal.classes),
        "default_class": principal.default_class,
        "metadata": dict(principal.metadata),
        "key_sha256": key.key_sha256,
        "created_at": _written(key.created_at),
        "expires_at": _written(key.expires_at),
        "revoked_at": _written(key.revoked_at),
    }


def _row(key: StoredKey) -> tuple[str, ...]:
    principal = key.principal
    classes = [*principal.classes, *([f"{principal.default_class} by default"] if principal.default_class else [])]
    return (
        principal.key_id,
        principal.tenant,
        principal.limits or "-",
        "all" if principal.models is None else ",".join(sorted(principal.models)),
        ", ".join(classes) or "-",
        f"{key.created_at:%Y-%m-%d}" if key.created_at is not None else "-",
        _state(key),
    )


def _state(key: StoredKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d}"
    if key.expires_at is None:
        return "good"
    return f"{'expired' if key.expires_at <= datetime.now(UTC) else 'good until'} {key.expires_at:%Y-%m-%d %H:%M}Z"


def _written(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 2030-01-31T12:00+00:00") from None
    if moment.tzinfo is None:
        if "T" in text or " " in text:
            raise argparse.ArgumentTypeError(f"{text!r} has no time zone; add +00:00 or another")
        moment = moment.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text!r} has passed already")
    return moment


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
