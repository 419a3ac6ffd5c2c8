"""A server of models over the network: `dagexec serve` (docs/serving.md)."""
