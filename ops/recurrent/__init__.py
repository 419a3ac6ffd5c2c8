"""Recurrent layers over whole sequences, and their gradients.

- `layer`, `layer_gradient`: what LSTM and GRU share: sizes, optional inputs, padding, products over all steps; the
  maker of their gradients.
- `lstm`, `gru`, `lstm_gradient`, `gru_gradient`: the operators.
"""

from dagexec.ops.recurrent import gru, gru_gradient, lstm, lstm_gradient

__all__ = ["gru", "gru_gradient", "lstm", "lstm_gradient"]
