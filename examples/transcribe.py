"""How do I run an encoder and a decoder, such as Whisper's?

    sound -> encoder -> what the decoder reads of it, once -> session -> words
                                                                \\_ its own caches grow

Both have the form of Whisper as PyTorch exports it, and random weights: the words are numbers that mean nothing.
"""

import numpy as np
import numpy.typing as npt
from random_models.decoders import whisper_decoder, whisper_encoder

import dagexec
from dagexec import Session

BANDS, SAMPLES = 16, 200
START = [1, 50, 60]
"""Words that tell a decoder where a text begins, in which language, and what to do."""


def transcribe(session: Session, count: int) -> list[int]:
    """The best word each time."""
    words: list[int] = []
    for _ in range(count):
        scores = session.run({"ids": np.array([words[-1:] or START])})["scores"]
        words.append(int(scores[0, -1].argmax()))
    return words


def sounds(count: int) -> list[npt.NDArray[np.float32]]:
    """Noise in bands of frequencies."""
    return list(np.random.default_rng(0).standard_normal((count, 1, BANDS, SAMPLES), np.float32))


def main() -> None:
    """Print words for two sounds."""
    with (
        dagexec.compile(whisper_encoder(bands=BANDS)) as encoder,
        dagexec.compile(whisper_decoder()) as decoder,
    ):
        for sound in sounds(2):
            with decoder.session() as session:
                session.reset(encoder.run({"sound": sound}))
                print("words:", *transcribe(session, 16))


if __name__ == "__main__":
    main()
