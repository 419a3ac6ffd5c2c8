"""Tuning: what is chosen for a model by measurement - the layout of its images, net type and workers."""
