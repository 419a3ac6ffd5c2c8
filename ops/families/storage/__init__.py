"""Operators on databases: what Save and Checkpoint write, Load reads, and TensorProtosDBInput feeds from."""
