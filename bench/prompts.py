"""Distinct prompts of about the same length, so that no two requests share more than the template."""

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


def distinct(n: int) -> list[str]:
    """`n` user messages, each about something else."""
    return [
        f"Write a long and detailed story, number {i}, about {_TOPICS[i % len(_TOPICS)]}. "
        "Describe the people, the place and what happens, step by step."
        for i in range(n)
    ]
