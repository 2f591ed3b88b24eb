"""countdown-v1: reach a target with given numbers and arithmetic."""

from .environment import Countdown, CountdownOptions

__all__ = ["Countdown", "CountdownOptions"]
