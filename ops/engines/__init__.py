"""Other ways of computing the operators of the families: a package an engine."""
