"""The layers of a model helper, by family; each is a mixin of `dagexec.training.model_builder.ModelBuilder`."""
