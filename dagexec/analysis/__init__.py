"""Questions about a model: runtimes side by side, what-if predictions, precision, controlled schedules."""
