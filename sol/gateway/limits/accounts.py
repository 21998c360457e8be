"""All that a gateway has in a database, opened and closed together."""

from __future__ import annotations

from sol.gateway.limits.config import DatabaseOptions
from sol.gateway.limits.database import Database
from sol.gateway.limits.journal import Journal
from sol.gateway.limits.keys import DatabaseKeys
from sol.gateway.limits.usage import UsageWriter


class Accounts:
    """Keys and usage in a database. Raises `ConfigError` for one that cannot be used."""

    def __init__(self, options: DatabaseOptions) -> None:
        self.database = Database(options)
        self.keys = DatabaseKeys(self.database, refresh=options.key_refresh_seconds)
        self.usage = UsageWriter(
            self.database, Journal(options.journal, options.journal_max_bytes), flush=options.flush_seconds
        )

    async def start(self) -> None:
        await self.keys.start()
        await self.usage.start()

    async def close(self) -> None:
        await self.keys.close()
        await self.usage.close()
        await self.database.close()
