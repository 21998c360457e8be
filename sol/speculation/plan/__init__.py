"""What to draft and how much of it to verify: decided from measured times and acceptance, without a tensor."""

from sol.speculation.plan.costs import shapes_to_measure
from sol.speculation.plan.fixed import FixedController
from sol.speculation.plan.goodput import GoodputController
from sol.speculation.plan.guarded import GuardedController
from sol.speculation.plan.types import Candidate, Controller, Drafter, Emission, StepShape

__all__ = [
    "Candidate",
    "Controller",
    "Drafter",
    "Emission",
    "FixedController",
    "GoodputController",
    "GuardedController",
    "StepShape",
    "shapes_to_measure",
]
