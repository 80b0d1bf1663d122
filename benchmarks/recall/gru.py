"""A GRU as a layer: a state that is more than a sum."""

from torch import Tensor, nn

from lineartime import ModelConfig, ResidualLayer, SequenceInfo
from lineartime.model.decoding.cache import Cache


class GRU(ResidualLayer):
    """x + h, h the states of PyTorch's GRU over norm(x); for rows of one document."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.gru = nn.GRU(config.d_model, config.d_model, batch_first=True)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        return self.gru(normed_BTD)[0]
