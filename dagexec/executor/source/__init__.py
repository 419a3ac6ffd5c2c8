"""What an executor is made of: anything to a Model, what its options mean, and types in its own words."""
