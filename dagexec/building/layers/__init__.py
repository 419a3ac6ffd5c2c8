"""The layers of a model builder, by family; each is a mixin of `dagexec.building.net_builder.NetBuilder`."""
