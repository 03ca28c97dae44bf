"""Runs a state machine that talks to a real server: as many examples as asked, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

__all__ = ["run_machine"]


def run_machine(make: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    """`examples` runs of up to `steps` rules each, without time limits of Hypothesis's own."""
    run_state_machine_as_test(
        make,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
