"""The nets: simple, dag, async_dag, and those captured as one launch of a device."""
