"""Plans that are kept: compiled models in files that open at little cost (docs/plans.md)."""
