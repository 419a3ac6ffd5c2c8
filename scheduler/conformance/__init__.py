"""Conformance: checks that what the threads of real runs did is a path of the machine that decides in them.

`recording` has pools record what they do, `checking` replays that beside the machine, `pools` checks whom a pool wakes.
"""

from dagexec.scheduler.conformance.checking import check
from dagexec.scheduler.conformance.recording import Conformance, StepNote, conforming
from dagexec.scheduler.conformance.story import Deviation, Event, Kind, RunStory

__all__ = ["Conformance", "Deviation", "Event", "Kind", "RunStory", "StepNote", "check", "conforming"]
