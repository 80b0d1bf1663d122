"""The paper's tables and figures as cells: a model of a row in a column, and which of them each scale runs.

Labels are the paper's, and its own numbers are in `paper.toml` by the same labels. What a cell's run is set to
is worked out in `scales`; two tables that ask for the same run share it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lineartime.config import TASKS

ScaleName = Literal["paper", "gpu", "cpu"]
SCALE_NAMES: tuple[ScaleName, ...] = ("paper", "gpu", "cpu")


@dataclass(frozen=True)
class Model:
    """A row: a preset with fields replaced."""

    preset: str
    fields: dict[str, Any] = field(default_factory=dict)
    """What makes it this row, at every scale: fields of the model or of its training."""
    size: dict[str, Any] = field(default_factory=dict)
    """Where the row has a size of its own: at the paper's scale only, for the others have one size for all."""
    cpu: dict[str, Any] = field(default_factory=dict)
    """Fields that the smallest scale has besides, or in place of those of the same name."""


@dataclass(frozen=True)
class Column:
    """A column: a text, a context and what is learned."""

    task: Literal["wiki40b", "c4", "pg19", "triviaqa"]
    """Whose text, and at the paper's scale whose specification. MLM on c4 and triviaqa, else language modelling."""
    context: int
    tokens: int | None = None
    """Tokens in a step, where the column says so."""
    cpu_vocab_size: int | None = None
    """Of the text at the smallest scale, where it is not that scale's."""


Cells = tuple[tuple[str, ...], tuple[str, ...]]
"""Rows and columns: every one of the first in every one of the second."""


@dataclass(frozen=True)
class Table:
    """One table or figure."""

    name: str
    title: str
    models: dict[str, Model]
    columns: dict[str, Column]
    gpu: tuple[Cells, ...]
    """What is run at that scale; the paper's is all."""
    cpu: tuple[Cells, ...]
    kind: Literal["train", "step"] = "train"
    """"train" trains to the end and times steps side by side; "step" only times them."""
    reference: str | None = None
    """The row whose final quality the speed-up is measured to."""
    one_seed: tuple[str, ...] = ()
    """Rows that the smallest scale runs with one seed, as they take long there; no difference to them is claimed."""
    cpu_caption: str = ""
    """What a study has at the smallest scale in place of that scale's choices."""

    def cells(self, scale: ScaleName) -> list[tuple[str, str]]:
        """Row and column of each cell that is run, without repetition."""
        parts = {"paper": ((tuple(self.models), tuple(self.columns)),), "gpu": self.gpu, "cpu": self.cpu}[scale]
        return list(dict.fromkeys((row, column) for rows, columns in parts for column in columns for row in rows))


def contexts(task: Literal["wiki40b", "c4", "pg19", "triviaqa"], *lengths: int, prefix: str = "") -> dict[str, Column]:
    return {f"{prefix}{length}": Column(task, length) for length in lengths}


def sized(n_layers: int, d_model: int, n_heads: int = 1) -> dict[str, int]:
    return {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads}


TRANSFORMER, PLUS, PLUS_PLUS = Model("transformer"), Model("transformer+"), Model("transformer++")
PERFORMER, COMBINER = Model("performer", {"prefix_sum": "blocks"}), Model("combiner")
QUAD, FLASH, MC = Model("flash-quad"), Model("flash"), Model("mc-tfm++")
ALL_MODELS = {"Transformer": TRANSFORMER, "Transformer+": PLUS, "Transformer++": PLUS_PLUS, "Performer": PERFORMER,
              "Combiner": COMBINER, "FLASH-Quad": QUAD, "FLASH": FLASH}
SHORT = {"LM": Column("wiki40b", 512), "MLM": Column("c4", 512)}
BOTH = ("LM", "MLM")
"""The short context of Section 2's experiments, causal and masked."""


def ablation(name: str, title: str, models: dict[str, Model], n_layers: int | None = None) -> Table:
    """Table 1 or 2: one change at a time, as large as Figure 3's models."""
    size = {} if n_layers is None else {"n_layers": n_layers}
    models = {label: Model(model.preset, model.fields, size) for label, model in models.items()}
    return Table(name, title, models, SHORT, gpu=((tuple(models), BOTH),), cpu=((tuple(models), BOTH),))


FIGURE_3 = {
    f"{name} {layers} x {width}": Model(preset, size=sized(n, width, heads))
    for width, heads, depths in ((512, 8, (8, 8, 15)), (768, 12, (12, 12, 22)), (1024, 16, (24, 24, 46)))
    for (name, preset), n in zip((("MHSA+MLP", "transformer+"), ("MHSA+GLU", "transformer++"), ("GAU", "flash-quad")),
                                 depths, strict=True)
    for layers, heads in ((f"{n}+{n}" if preset != "flash-quad" else f"{n}", heads if preset != "flash-quad" else 1),)
}
ONE_SIZE = ("MHSA+MLP 12+12 x 768", "MHSA+GLU 12+12 x 768", "GAU 22 x 768")

CHUNKED = {"C = 1": Model("flash", {"chunk_size": 1}), "C = 16": Model("flash", {"chunk_size": 16}),
           "C = 64": Model("flash", {"chunk_size": 64}), "C = 128": Model("flash", {"chunk_size": 128}),
           "C = 256": Model("flash", {"chunk_size": 256}), "C = 512": Model("flash", {"chunk_size": 512}),
           "C = T": QUAD}
"""C = T is FLASH-Quad: causal, with one chunk the linear part sees nothing (tests/core/test_laws.py)."""

TRIVIAQA = {
    "Transformer+": PLUS, "Combiner": COMBINER,
    "FLASH-Quad s=128": Model("flash-quad", {"query_key_dim": 128}, cpu={"query_key_dim": 16}),
    "FLASH-Quad s=512": Model("flash-quad", {"query_key_dim": 512}, cpu={"query_key_dim": 64}),
    "FLASH s=512": Model("flash", {"query_key_dim": 512}, cpu={"query_key_dim": 64}),
    "FLASH s=512 + first-to-all": Model("flash", {"query_key_dim": 512, "first_to_all": True},
                                        cpu={"query_key_dim": 64})}

LARGER: dict[str, Any] = {"d_model": 128, "init_std": 0.02, "steps": 4000, "warmup_steps": 400, "eval_every": 200,
                          "save_every": 1000}
GAUS, PAIRS = {"n_layers": 6, "query_key_dim": 64}, {"n_layers": 3, "n_heads": 4}
MORE_TOKENS = {
    label: Model(preset, fields, cpu=LARGER | (GAUS if preset.startswith("flash") else PAIRS) | {"learning_rate": rate})
    for label, preset, fields, rate in (
        ("Transformer", "transformer", {}, 5e-3), ("Transformer++", "transformer++", {}, 5e-3),
        ("Transformer++, 2e-3", "transformer++", {}, 2e-3), ("FLASH-Quad", "flash-quad", {}, 5e-3),
        ("FLASH", "flash", {}, 5e-3), ("FLASH (LocalOnly)", "flash", {"chunk_parts": "local"}, 5e-3))}
LEARNING_RATES = {f"{label}, {rate:g}": Model(preset, {"learning_rate": rate}) for label, preset, rates in (
    ("Transformer++", "transformer++", (4e-3, 8e-3, 16e-3)), ("FLASH-Quad", "flash-quad", (4e-3, 8e-3)),
    ("FLASH", "flash", (4e-3, 8e-3, 16e-3))) for rate in rates}
INITIAL_VALUES = {
    "Transformer++": PLUS_PLUS, "FLASH-Quad": QUAD, "FLASH": FLASH,
    **{f"{label}, 0.02": Model(preset, {"init_std": 0.02}) for label, preset in (
        ("Transformer++", "transformer++"), ("FLASH-Quad", "flash-quad"), ("FLASH", "flash"))},
    "Transformer++, 0.02, 2e-3": Model("transformer++", {"init_std": 0.02, "learning_rate": 2e-3})}

TABLES = {table.name: table for table in (
    Table("gau_vs_transformer", "Figure 3: GAU and Transformers at a short context", FIGURE_3, SHORT,
          gpu=((ONE_SIZE, BOTH),), cpu=((ONE_SIZE, BOTH),)),
    ablation("gau_ablation", "Table 1: changes to GAU", {
        "original GAU": QUAD, "relu2 -> softmax": Model("flash-quad", {"attn_kernel": "softmax"}),
        "single-head -> multi-head": Model("flash-quad", {"n_heads": 8}),
        "no gating": Model("flash-quad", {"gate": False})}, n_layers=22),
    ablation("mhsa_ablation", "Table 2: changes to MHSA", {
        "original MHSA": PLUS_PLUS, "softmax -> relu2": Model("transformer++", {"attn_kernel": "relu2"}),
        "multi-head -> single-head": Model("transformer++", {"n_heads": 1}),
        "add gating": Model("transformer++", {"gate": True, "expansion_factor": 3.25})}),
    Table("mlm_c4", "Table 12 and Figure 5: masked language models on C4", ALL_MODELS,
          contexts("c4", 512, 1024, 2048, 4096, 8192), reference="Transformer++",
          gpu=((("Transformer++", "FLASH-Quad", "FLASH"), ("512", "2048", "8192")),),
          cpu=((("Transformer++", "Combiner", "FLASH-Quad", "FLASH"), ("512", "2048")),)),
    Table("lm_wiki40b", "Table 13 and Figure 6: language models on Wiki-40B", ALL_MODELS,
          contexts("wiki40b", 512, 1024, 2048, 4096, 8192), reference="Transformer++",
          gpu=((("Transformer", "Transformer++", "FLASH-Quad", "FLASH"), ("512", "2048", "8192")),),
          cpu=((("Transformer", "Transformer++", "FLASH-Quad", "FLASH"), ("512", "2048")),)),
    Table("lm_pg19", "Table 3: language models on PG-19",
          {name: ALL_MODELS[name] for name in ("Transformer+", "Transformer++", "Combiner", "FLASH-Quad", "FLASH")},
          contexts("pg19", 1024, 2048, 4096, 8192), reference="Transformer+",
          gpu=((("FLASH", "Transformer++", "FLASH-Quad", "Transformer+"), ("8192", "1024", "4096", "2048")),),
          cpu=((("Transformer+", "Transformer++", "FLASH-Quad", "FLASH"), ("1024", "4096")),)),
    Table("triviaqa", "Table 4: TriviaQA", TRIVIAQA,
          {"4096": Column("triviaqa", 4096)}, reference="Transformer+",
          gpu=((("Transformer+", "FLASH-Quad s=512", "FLASH s=512"), ("4096",)),),
          cpu=((tuple(TRIVIAQA), ("4096",)),), one_seed=tuple(TRIVIAQA)),
    Table("flash_ablation", "Figure 7: FLASH with one of its parts, and mixed chunks in a Transformer++", {
        "FLASH": FLASH, "FLASH (LocalOnly)": Model("flash", {"chunk_parts": "local"}),
        "FLASH (GlobalOnly)": Model("flash", {"chunk_parts": "global", "chunk_size": 64}, cpu={"chunk_size": 16}),
        "MC-TFM++": MC},
          contexts("wiki40b", 512, 1024, 2048, 4096, 8192), reference="MC-TFM++",
          gpu=((("FLASH", "FLASH (LocalOnly)", "FLASH (GlobalOnly)", "MC-TFM++"), ("8192", "2048")),),
          cpu=((("FLASH", "FLASH (LocalOnly)", "FLASH (GlobalOnly)", "MC-TFM++"), ("2048", "512")),)),
    Table("gap", "Table 5: what mixed chunks cost a GAU and a Transformer++",
          {"FLASH-Quad": QUAD, "FLASH": FLASH, "TFM++": PLUS_PLUS, "MC-TFM++": MC},
          contexts("c4", 512, 1024, 2048, 4096, 8192, prefix="MLM ")
          | contexts("wiki40b", 512, 1024, 2048, 4096, 8192, prefix="LM "),
          gpu=((("FLASH-Quad", "FLASH", "TFM++", "MC-TFM++"), ("LM 8192", "LM 2048")),),
          cpu=((("FLASH-Quad", "FLASH", "TFM++", "MC-TFM++"), ("LM 2048", "MLM 2048")),)),
    Table("chunk_size", "Figure 8: chunk sizes", CHUNKED, contexts("wiki40b", 512, 1024, 2048, 4096, 8192),
          gpu=((("C = 128", "C = 256", "C = 512", "C = T"), ("1024", "8192")),),
          cpu=((("C = 16",), ("2048",)), (("C = 64", "C = 256", "C = T"), ("2048", "512")), (("C = 1",), ("512",))),
          one_seed=("C = 1",)),
    Table("gpu_latency", "Table 11: milliseconds of a training step on one device",
          {"Transformer++": PLUS_PLUS, "Performer": Model("performer"),
           "Performer-Matmul": Model("performer-matmul"), "FLASH": FLASH},
          {f"{length} x {rows}": Column("wiki40b", length, length * rows)
           for length, rows in ((512, 4), (1024, 2), (2048, 1), (4096, 1))}, kind="step",
          gpu=((("Transformer++", "Performer", "Performer-Matmul", "FLASH"),
                ("512 x 4", "1024 x 2", "2048 x 1", "4096 x 1")),),
          cpu=((("Transformer++", "Performer", "Performer-Matmul", "FLASH"), ("512 x 4", "2048 x 1")),)),
    Table("position_bias", "A study of ours: what the form of the position bias does in short training", {
        "FLASH": FLASH, "FLASH-Quad": QUAD, "FLASH-Quad, n = 512": Model("flash-quad", {"attn_scale_len": 512}),
        "Transformer++": PLUS_PLUS, "Transformer++, relu2": Model("transformer++", {"attn_kernel": "relu2"}),
        "Transformer++, relu2, n = 512": Model("transformer++", {"attn_kernel": "relu2", "attn_scale_len": 512})},
          contexts("wiki40b", 256), reference="Transformer++",
          gpu=((("FLASH-Quad", "FLASH-Quad, n = 512"), ("256",)),),
          cpu=((("FLASH", "FLASH-Quad", "FLASH-Quad, n = 512", "Transformer++", "Transformer++, relu2",
                 "Transformer++, relu2, n = 512"), ("256",)),)),
    Table("learning_rates", "A study of ours: the learning rates of the smallest scale", LEARNING_RATES,
          contexts("wiki40b", 512), one_seed=tuple(LEARNING_RATES),
          gpu=((tuple(LEARNING_RATES), ("512",)),), cpu=((tuple(LEARNING_RATES), ("512",)),)),
    Table("initial_values", "A study of ours: initial matrices of the paper's 0.02 in a narrow model", INITIAL_VALUES,
          contexts("wiki40b", 512), one_seed=tuple(INITIAL_VALUES)[3:],
          gpu=((("Transformer++", "FLASH-Quad", "FLASH"), ("512",)),), cpu=((tuple(INITIAL_VALUES), ("512",)),)),
    Table("more_tokens", "A study of ours: twice the width, four times the steps", MORE_TOKENS,
          {"512": Column("pg19", 512, cpu_vocab_size=4096)}, reference="Transformer++", one_seed=tuple(MORE_TOKENS),
          cpu_caption="two processor cores: width 128, 6 GAU layers (s = 64) or 3 pairs (4 heads), chunks of 64, a "
          "small text in the form of PG-19's, vocabulary 4,096, 4,000 steps of 4,096 tokens, a tenth of them warm-up, "
          "initial matrices of 0.02, learning rate 5e-3 unless the row has one",
          gpu=((("Transformer++", "FLASH-Quad", "FLASH"), ("512",)),), cpu=((tuple(MORE_TOKENS), ("512",)),)),
    Table("speedup", "Figure 1: FLASH's speed-up over both Transformers on Wiki-40B",
          {"Transformer": TRANSFORMER, "Transformer++": PLUS_PLUS, "FLASH": FLASH},
          contexts("wiki40b", 512, 1024, 2048, 4096, 8192),
          gpu=((("Transformer", "Transformer++", "FLASH"), ("512", "2048", "8192")),),
          cpu=((("Transformer", "Transformer++", "FLASH"), ("512", "2048")),)),
)}
assert {column.task for table in TABLES.values() for column in table.columns.values()} == {*TASKS, "triviaqa"}
