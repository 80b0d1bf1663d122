"""Questions that a tiny model can learn to answer."""

import json

NAMES = ["Ada", "Byron", "Curie", "Darwin", "Euler", "Fermi", "Gauss", "Hopper"]


def write_questions(path, first, n):
    """TriviaQA: who lives where. Documents are in `evidence/` beside the questions' folder."""
    records = []
    evidence = path.parent.parent / "evidence" / "wikipedia"
    for folder in (path.parent, evidence):
        folder.mkdir(parents=True, exist_ok=True)
    for i in range(first, first + n):
        names = [NAMES[(i + k) % len(NAMES)] for k in range(3)]
        (evidence / f"{i}.txt").write_text(" ".join(f"{name} lives in town {i + k}." for k, name in enumerate(names)))
        records += [{"QuestionId": f"{i}-{k}", "Question": f"Town {i + k}?", "EntityPages": [{"Filename": f"{i}.txt"}],
                     "Answer": {"Value": name, "Aliases": [name], "NormalizedAliases": [name.lower()]}}
                    for k, name in enumerate(names)]
    path.write_text(json.dumps({"Domain": "Wikipedia", "VerifiedEval": False, "Data": records}))
    return path
