"""Questions that a tiny model can learn to answer."""

import json

NAMES = ["Ada", "Byron", "Curie", "Darwin", "Euler", "Fermi", "Gauss", "Hopper"]


def write_questions(path, first, n):
    """SQuAD: who stands where, in a few sentences; every name stands once."""
    paragraphs = []
    for i in range(first, first + n):
        names = [NAMES[(i + k) % len(NAMES)] for k in range(3)]
        text = " ".join(f"{name} lives in town {i + k}." for k, name in enumerate(names))
        paragraphs.append({"context": text, "qas": [
            {"id": f"{i}-{k}", "question": f"Town {i + k}?",
             "answers": [{"text": name, "answer_start": text.index(name)}]} for k, name in enumerate(names)]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "towns", "paragraphs": paragraphs}]}))
    return path
