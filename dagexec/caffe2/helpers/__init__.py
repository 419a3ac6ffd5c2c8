"""The layers of `brew`: functions of a model, blobs and sizes, which add operators and parameters."""
