"""Many replicas of a model beyond one process: how requests are routed to them, and what many machines would give."""
