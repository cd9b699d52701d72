"""The small models and plans of the tests of plans, for those of one framework."""

from __future__ import annotations

from tests.plan.conftest import _plan_for, _toys

__all__ = ["_plan_for", "_toys"]
