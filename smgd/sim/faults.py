"""The three ways in which a vLLM engine breaks, and what the simulated one does for each.

vLLM's engine core trusts its front end, so a bad message does not get an error answer. It raises in
one of three threads, and what is left of the engine differs (measured on 0.27.1 and 0.32.0).
"""

from __future__ import annotations

from smgd.errors import SmgdError


class EngineFaultError(SmgdError):
    """Base of the three; the text is what vLLM would leave in its log."""


class MainLoopError(EngineFaultError):
    """Class D: the engine says `ENGINE_CORE_DEAD`, drops its output, later its input, and exits."""


class InputThreadError(EngineFaultError):
    """Class Z: the input connection closes; what runs still finishes, and the process stays."""


class OutputThreadError(EngineFaultError):
    """Class Y: the output connection closes; requests are still taken and computed."""
