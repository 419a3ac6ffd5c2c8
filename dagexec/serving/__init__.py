"""The inside of an executor: requests, their queue and dispatch, statistics and telemetry."""
