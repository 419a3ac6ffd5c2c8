"""Update operators on CUDA: one kernel for the parameter and all its state, dense or of the rows that indices name.

Learning rates, weights and the iteration are read on the device.
"""
