"""Whether speculation changes what a model says: checked on the model itself, through engines as users run them.

`run_checks` starts the engines it needs one after the other, so that a model is in memory once. Nothing here imports
torch unless tokens differ and somebody has to say why.
"""

from sol.verification.checks import Checks, run_checks, speculation_is_off
from sol.verification.prompts import Prompt, built_in_prompts, read_prompts
from sol.verification.report import Report

__all__ = ["Checks", "Prompt", "Report", "built_in_prompts", "read_prompts", "run_checks", "speculation_is_off"]
