"""`python -m sol` is the `sol` command."""

from __future__ import annotations

import sys

from sol.cli import main

if __name__ == "__main__":
    sys.exit(main())
