"""Conformance: what threads really did in runs is a path of the machine that decides in them.

`recording` has pools tell what they do, `checking` replays that beside the machine, `pools` looks at whom a pool wakes.
"""

from dagexec.scheduler.conformance.checking import check
from dagexec.scheduler.conformance.recording import Conformance, StepNote, conforming
from dagexec.scheduler.conformance.story import Deviation, Event, Kind, RunStory

__all__ = ["Conformance", "Deviation", "Event", "Kind", "RunStory", "StepNote", "check", "conforming"]
