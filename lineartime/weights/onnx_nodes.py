"""Writing a graph of ONNX as NumPy is written."""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper
from torch import Tensor

INT64, FLOAT, DOUBLE, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BOOL
OPERATORS = {"add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "mod": "Mod", "matmul": "MatMul", "and": "And",
             "or": "Or", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"}


class Graph:
    """Nodes in the making: `g.Relu(x)` adds one and gives its output. Numbers become constants,
    those of Python int64 or float32."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[Any, Any] = {}
        self.n_names = 0

    def __getattr__(self, kind: str) -> Any:
        return partial(self.node, kind)

    def node(self, kind: str, *inputs: Any, n: int = 1, **attributes: Any) -> Any:
        outputs = [Value(self, f"{kind}_{self.n_names + i}") for i in range(n)]
        self.n_names += n
        self.nodes.append(helper.make_node(kind, [*map(self.name_of, inputs)], [x.name for x in outputs], **attributes))
        return outputs[0] if n == 1 else outputs

    def name_of(self, x: Any) -> str:
        if isinstance(x, Value | str):
            return str(getattr(x, "name", x))
        x = x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float32 if type(x) is float else None)
        made = numpy_helper.from_array(x, f"constant_{len(self.constants)}")
        return str(self.constants.setdefault((x.dtype, x.shape, sha256(x.tobytes()).digest()), made).name)

    def branch(self, make: Callable[..., list["Value"]], *inputs: Any) -> GraphProto:
        """What `make` gives of inputs, with its nodes in a graph of their own."""
        outside, self.nodes = self.nodes, []
        outputs = [helper.make_tensor_value_info(x.name, x.dtype, None) for x in make(*(
            Value(self, each.name) for each in inputs))]
        inside, self.nodes = self.nodes, outside
        return helper.make_graph(inside, f"graph_{self.n_names}", inputs, outputs)


class Value:
    """The output of a node, with numpy's operators and slices, where None is a new axis."""

    def __init__(self, graph: Graph, name: str, dtype: int = FLOAT):
        self.graph, self.name, self.dtype = graph, name, dtype  # dtype: what a graph says of an output

    def __getitem__(self, index: tuple[slice | None, ...]) -> Any:
        x, g, parts = self, self.graph, [part for part in index if part is not None]
        cuts = [(axis, part) for axis, part in enumerate(parts) if part.start is not None or part.stop is not None]
        if cuts:
            stops = [1 << 62 if part.stop is None else part.stop for _, part in cuts]
            one_by_one = [stop if isinstance(stop, Value) else [stop] for stop in stops]
            is_known = all(isinstance(stop, int) for stop in stops)
            x = g.Slice(x, [part.start or 0 for _, part in cuts], stops if is_known else g.Concat(*one_by_one, axis=0),
                        [axis for axis, _ in cuts])
        new = [axis for axis, part in enumerate(index) if part is None]
        return g.Unsqueeze(x, new) if new else x

    def to(self, dtype: int) -> Any:
        return self.graph.Cast(self, to=dtype)


for operator, operation in OPERATORS.items():
    setattr(Value, f"__{operator}__", lambda a, b, kind=operation: a.graph.node(kind, a, b))
