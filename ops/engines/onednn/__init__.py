"""Engine ONEDNN: operators computed by oneDNN's primitives, where the library is installed."""
