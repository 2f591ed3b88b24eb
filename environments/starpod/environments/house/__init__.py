"""house-v1: household tasks in text: find, clean, heat, cool, light and place things."""

from .environment import House, HouseOptions

__all__ = ["House", "HouseOptions"]
