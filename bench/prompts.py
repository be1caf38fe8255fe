"""Distinct prompts of about the same length, so that no two requests share more than the template."""

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

TOKENS_A_SENTENCE = 23

Message: TypeAlias = dict[str, str]

_TOPICS = (
    "a lighthouse keeper",
    "the history of bread",
    "how rivers shape land",
    "a lost umbrella",
    "learning to swim",
    "the first railway",
    "a town without clocks",
    "growing tomatoes",
    "the night sky in winter",
    "an old violin",
    "crossing a desert",
    "a market in the rain",
    "building a stone bridge",
    "the life of a bee",
    "a letter never sent",
    "repairing a bicycle",
    "the taste of salt",
    "a library at midnight",
    "walking to the sea",
    "a very small orchestra",
    "the invention of paper",
    "a garden on a roof",
    "two brothers and a boat",
    "how glass is made",
    "a snowed-in inn",
    "the memory of elephants",
    "a map with an error",
    "baking for a wedding",
    "the sound of a harbour",
    "a kite festival",
    "moving to a new city",
    "the colour blue",
    "a teacher of mathematics",
    "why leaves fall",
    "a chess game by post",
)


def distinct(n: int, run: str = "0") -> list[str]:
    """`n` user messages, each about something else; those of another run differ from the first word on."""
    return [
        f"{i}.{run}: Write a long and detailed story about {_TOPICS[i % len(_TOPICS)]}. "
        "Describe the people, the place and what happens, step by step."
        for i in range(n)
    ]


def passage(n_tokens: int, run: str) -> str:
    """Sentences that come to about `n_tokens` in most vocabularies; another run's differ everywhere."""
    chance = random.Random(run)
    sentences = [f"{run}:"]
    for number in range(n_tokens // TOKENS_A_SENTENCE):
        first, second = chance.sample(_TOPICS, 2)
        sentences.append(f"Chapter {number} begins with {first} and ends, much later, with {second}.")
    return " ".join(sentences)


def sampled(messages: Sequence[Message], n_tokens: int) -> dict[str, Any]:
    """The body of a request that leaves it to the server how tokens are drawn, `n_tokens` at most."""
    return {"messages": list(messages), "max_tokens": n_tokens}


def greedy(messages: Sequence[Message], n_tokens: int) -> dict[str, Any]:
    """The body of a request that takes the likeliest tokens, `n_tokens` at most."""
    return {**sampled(messages, n_tokens), "temperature": 0}


def user(text: str) -> Message:
    return {"role": "user", "content": text}
