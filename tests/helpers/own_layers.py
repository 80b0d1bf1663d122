"""Layers of one's own: a convolution, a GAU, and Gated DeltaNet as transformers has it."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from lineartime import Cache, GatedAttentionUnit, LastTokens, ModelConfig, ResidualLayer, SequenceInfo


class CausalConv(ResidualLayer):
    """W_o SiLU(a depthwise convolution over a token and the three before it in its document)."""

    width = 4

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.conv = nn.Conv1d(config.d_model, config.d_model, self.width, groups=config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        near_BTDW = info.with_last(normed_BTD, self.width - 1, cache).unfold(1, self.width, 1)
        back_W = torch.arange(self.width, device=normed_BTD.device).flip(0)
        seen_BT1W = (back_W <= info.age_BT[..., None])[:, :, None]
        made_BTD = torch.where(seen_BT1W, near_BTDW, 0.0).mul(self.conv.weight[:, 0]).sum(-1) + self.conv.bias
        return self.project_out(nn.functional.silu(made_BTD))

    def empty_cache(self, n_rows: int) -> LastTokens:
        return LastTokens(self.like.new_zeros(n_rows, self.width - 1, self.config.d_model))


class SumOfChunks(GatedAttentionUnit):
    """A GAU with another linear half than the model's own GAUs."""

    def __init__(self, config: ModelConfig):
        super().__init__(dataclasses.replace(config, chunk_pooling="sum"))


@dataclasses.dataclass
class DeltaState(Cache):
    """The state of Gated DeltaNet, with the methods that the layer of transformers calls."""

    conv_BFK: Tensor
    matrix_BHKV: Tensor

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor:
        return self.conv_BFK

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor:
        return self.matrix_BHKV

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update_conv_state(self, new_BFT: Tensor, *_: Any, **__: Any) -> Tensor:
        whole_BFL = torch.cat([self.conv_BFK, new_BFT], dim=-1)
        self.conv_BFK.copy_(whole_BFL[..., -self.conv_BFK.shape[-1] :])
        return whole_BFL

    def update_recurrent_state(self, new_BHKV: Tensor, *_: Any, **__: Any) -> None:
        self.matrix_BHKV.copy_(new_BHKV)


class GatedDeltaNet(ResidualLayer):
    """The layer of transformers, which reads a document of a row at a time."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.net = Qwen3NextGatedDeltaNet(Qwen3NextConfig(
            hidden_size=config.d_model, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"]), 0)

    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        nn.init.ones_(self.net.norm.weight)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        state = self.empty_cache(len(normed_BTD)) if cache is None else cache
        age_BT, made_BTD = info.age_BT.expand(normed_BTD.shape[:2]), torch.zeros_like(normed_BTD)
        for row, age_T in enumerate(age_BT.tolist()):
            of_row = DeltaState(state.conv_BFK[row, None], state.matrix_BHKV[row, None])
            n_new = len(age_T) if info.inputs is None else int(info.inputs.n_new_B[row])
            starts = [place for place in range(n_new) if place == 0 or age_T[place] == 0]
            for start, stop in itertools.pairwise([*starts, n_new]):
                if age_T[start] == 0:  # a document begins
                    of_row.conv_BFK.zero_()
                    of_row.matrix_BHKV.zero_()
                made_BTD[row, start:stop] = self.net(normed_BTD[row, None, start:stop], cache_params=of_row)[0]
        return made_BTD

    def empty_cache(self, n_rows: int) -> DeltaState:
        zeros = self.like.new_zeros
        return DeltaState(zeros(n_rows, self.net.conv_dim, self.net.conv_kernel_size), zeros(n_rows, 2, 8, 8))
