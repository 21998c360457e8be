"""What every section of gateway.yaml is made of, and secrets that stand elsewhere."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Section(BaseModel):
    """Unknown names are errors, and nothing changes once it is read. What must not show in a log is not in `repr`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def expand(text: str) -> str:
    """`text` with `${NAME}` replaced by the environment's variable of this name. Raises ValueError without one."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ValueError(f"the environment has no variable {name}; set it, or write the value out")
        return os.environ[name]

    return _REFERENCE.sub(value, text)


Expanded = Annotated[str, AfterValidator(expand)]
"""A string in which `${NAME}` stands for a variable of the environment."""
