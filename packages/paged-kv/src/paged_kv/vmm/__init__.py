"""Physical memory behind reserved addresses: what a cache commits, who pays, and when a graph survives it."""

from .driver import DriverCalls, VmmDriver

__all__ = ["DriverCalls", "VmmDriver"]
