"""How requests are run: on workers, in the thread of the caller, or in the turns of its event loop."""
