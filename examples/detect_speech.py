"""How do I run a detector on a thousand streams of sound?

    stream 1:    frame -> session -> probability, frame -> session -> ...
    stream 2:    frame -> session -> probability, ...          runs of the same moment are joined
    ...

The detector is of the kind of Silero's, with random weights: convolutions that see the end of the frame before, and an
LSTM. What they leave for the next frame stays in the stream's session.
"""

import asyncio

import numpy as np
import numpy.typing as npt
from random_models.detector import HOP, detector

import dagexec

Array = npt.NDArray[np.float32]

STREAMS, FRAMES = 1000, 5


def sounds(streams: int, frames: int) -> Array:
    """Noise of streams, in frames."""
    return np.random.default_rng(0).standard_normal((frames, streams, 1, HOP), np.float32)


async def detect(sound: Array) -> Array:
    """The probability of speech in each frame of each stream."""
    axes = {"samples": 0, "context": 0, "state": 1}
    async with dagexec.compile(detector(), max_batch=64, batch_axes=axes, max_queued=STREAMS) as executor:
        sessions = [executor.session() for _ in range(sound.shape[1])]
        found = []
        for frames in sound:
            runs = [one.run_async({"samples": frame}) for one, frame in zip(sessions, frames, strict=True)]
            found.append([result["probability"][0, 0] for result in await asyncio.gather(*runs)])
    return np.array(found)


def main() -> None:
    """Print how many frames there were, and what is said of them."""
    found = asyncio.run(detect(sounds(STREAMS, FRAMES)))
    print(f"{found.size} frames of {STREAMS} streams, probabilities of {found.min():.2f} to {found.max():.2f}")


if __name__ == "__main__":
    main()
