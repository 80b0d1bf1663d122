"""Documents: their commands are disturbed as in `kills`, and what they read or go on with is damaged as in
`corruptions`."""

from pathlib import Path
from random import Random

from drills import corruptions, folders, kills
from drills.corruptions import Subject, in_python
from drills.folders import MADE, verb
from drills.kills import THERE, Scenario

RESULTS = ["vectors.npy", "vectors.jsonl", "labels.jsonl"]
SCENARIOS = {
    **{f"{name} of documents": Scenario(verb(*folders.read_documents(MADE, Path("{out}") / name)), when_done=THERE)
       for name in RESULTS},
    "finetune for labels": Scenario(verb(*folders.finetune_documents(MADE, "classify", "{it}"))),
    "finetune for vectors": Scenario(verb(*folders.finetune_documents(MADE, "embed", "{it}"))),
    "prepare --add-tokens": Scenario(verb(*folders.add_tokens(MADE, "{it}"))),
    "train --from": Scenario(verb(*folders.train_from("{made}/run", "{made}/extended", "{it}"))),
}
SUBJECTS = [
    *(Subject(f"parts/{name}.part", f"parts/{other}.part", {
        name: verb(*folders.read_documents(MADE, Path("{it.parent}") / name))})
      for name, other in zip(RESULTS, [*RESULTS[1:], RESULTS[0]], strict=True)),
    Subject("labels", "vectors", {
        "classify": verb("classify", "{it}", "{made}/dev.jsonl"),
        "export": verb("export", "{it}", "--out", "{out}/exported"),
        "finetune, complete": verb(*folders.finetune_documents(MADE, "classify", "{it}")),
        "load_model": in_python(corruptions.loaded)}),
    Subject("vectors", "labels", {
        "embed": verb("embed", "{it}", "{made}/dev.jsonl"),
        "load_model": in_python(corruptions.loaded)}),
    Subject("unfinished-labels", "labels", {
        "finetune, resumed": verb(*folders.finetune_documents(MADE, "classify", "{it}"))}),
    Subject("extended", "data", {
        "train --from": verb(*folders.train_from("{made}/run", "{it}", "{out}/run")),
        "prepare over": verb(*folders.add_tokens(MADE, "{it}"))}),
    Subject("shares", "extended", {
        "join": verb("prepare", "--join", "{it}/1", "{it}/2", "--out", "{out}/data")}),
]
PAIRS = [(subject, name) for subject in SUBJECTS for name in subject.readers]


def trial(made: Path, folder: Path, random: Random) -> dict[str, object]:
    """A command that is disturbed, or a file that is damaged and read."""
    if random.random() < 0.5:
        return kills.trial(made, folder, random, SCENARIOS, ())
    return corruptions.trial(made, folder, random, PAIRS)
