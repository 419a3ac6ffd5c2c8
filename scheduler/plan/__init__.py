"""What is known before a run: chains, their order, copies between devices, events, prepared steps."""
