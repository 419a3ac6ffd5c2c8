"""How do I generate text with a decoder that keeps its caches?

    prompt -> session -> scores -> a word -> session -> scores -> ...
                 \\-> fork -> another word -> ...

The decoder has the form of GPT-2 as PyTorch exports it, and random weights: it answers with numbers of words that mean
nothing.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from random_models.decoders import gpt

import dagexec
from dagexec import Session

Array = npt.NDArray[Any]

PROMPT = [17, 4, 256]


def log_chances(session: Session, words: list[int]) -> Array:
    """Of each word to be the next behind these, which the session has not seen."""
    scores: Array = session.run({"ids": np.array([words])})["scores"][0, -1].astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    return scores


def greedy(session: Session, count: int) -> list[int]:
    """The best word each time."""
    words: list[int] = []
    for _ in range(count):
        words.append(int(log_chances(session, words[-1:] or PROMPT).argmax()))
    return words


def top_k(session: Session, count: int, k: int = 10, seed: int = 0) -> list[int]:
    """One of the k best words each time, by chance."""
    random, words = np.random.default_rng(seed), list[int]()
    for _ in range(count):
        chances = np.exp(log_chances(session, words[-1:] or PROMPT))
        best = np.argsort(chances)[-k:]
        words.append(int(random.choice(best, p=chances[best] / chances[best].sum())))
    return words


def beam_search(session: Session, count: int, width: int = 4) -> list[int]:
    """The best of texts that are written side by side: the `width` best ways to go on from those of the step before."""
    beams = [(0.0, list[int](), session)]
    for _ in range(count):
        ways = []
        for total, words, beam in beams:
            chances = log_chances(beam, words[-1:] or PROMPT)
            ways += [(total + chances[word], [*words, int(word)], beam) for word in np.argsort(chances)[-width:]]
        best = sorted(ways, key=lambda way: -way[0])[:width]
        forks = [(total, words, beam.fork()) for total, words, beam in best]
        for *_, beam in beams:
            beam.close()  # a fork that is left alone with the caches goes on in them, without a copy
        beams = forks
    return beams[0][1]


def main() -> None:
    """Print a text of each kind."""
    with dagexec.compile(gpt()) as executor:
        for generate in (greedy, top_k, beam_search):
            print(f"{generate.__name__}:", *generate(executor.session(), 20))


if __name__ == "__main__":
    main()
