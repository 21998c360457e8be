"""Model servers, Sol's own and others': their command lines, their processes, their health and their metrics."""

from sol.engines.commands import ServerCommand, command_from_text
from sol.engines.service import Service, free_port

__all__ = ["ServerCommand", "Service", "command_from_text", "free_port"]
