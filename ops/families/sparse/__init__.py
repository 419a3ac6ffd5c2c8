"""Lists of different lengths, embedding tables and features."""
