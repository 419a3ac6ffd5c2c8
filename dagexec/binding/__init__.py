"""A model bound to memory: parameters placed once, replicas over them, and arrays in and out."""
