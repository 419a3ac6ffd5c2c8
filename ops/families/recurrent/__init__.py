"""Recurrent layers over whole sequences, their gradients, and the units of one step.

- `layer`, `layer_gradient`: what LSTM and GRU share: sizes, optional inputs, padding, products over all steps; the
  maker of their gradients.
- `lstm`, `gru`, `lstm_gradient`, `gru_gradient`: the operators.
- `dynamic_lstm`: LSTM on 8-bit integers; `variants`: other functions, peepholes and coupled gates.
- `links`: rows of sequences for step nets, as in Caffe2.
- `units`: one step on sums that other operators computed, as in Caffe2.
"""
