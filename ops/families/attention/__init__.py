"""Attention over sequences, what tells it places (rotary embeddings), and layers with a state in its place.

- `attention`: scaled dot products, softmax, weighted values, with masks and caches.
- `rotary`: rotations of queries and keys by their places.
- `linear`: attention by a state of fixed size, and the causal convolution before it.
"""
