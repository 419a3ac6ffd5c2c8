"""The numbers of tokens that vocabularies begin with."""

from __future__ import annotations

PAD_ID, GO_ID, EOS_ID, UNK_ID = range(4)
EOS, UNK, GO, PAD = "<EOS>", "<UNK>", "<GO>", "<PAD>"
