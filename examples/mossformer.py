"""MossFormer2's layer, `FLASH_ShareA_FFConvM` of ClearerVoice with its weights by name: padding
changes nothing, and a causal layer reads any length in parts, in constant memory.

    y = x + P3((A u * v) * sigmoid(A v * u)), [v u] = P1(x'), A: mixed chunk attention by P2(x')
    P(x) = f + conv(f), f = silu(W norm(x)); half of the features in x' are the frame before's

A convolution is over 17 frames, `look_ahead` of them later ones: in theirs 8, even where attention
is causal. With 0, weight i is that of the frame 16 - i before."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.ops import chunk_attention
from lineartime.ops.reference import CarriedState


def with_last(x_BTF: Tensor, n: int, state: dict[str, Tensor], name: str) -> Tensor:
    """x behind the n frames before it, 0 where a row begins. The state gets the last n."""
    x_BTF = torch.cat([state.get(name, x_BTF.new_zeros(len(x_BTF), n, x_BTF.shape[2])), x_BTF], 1)
    state[name] = x_BTF[:, x_BTF.shape[1] - n :].clone()
    return x_BTF


class Project(nn.Module):
    def __init__(self, d_in: int, d_out: int, look_ahead: int, dropout: float):
        super().__init__()
        conv = nn.ModuleDict({"conv": nn.Conv1d(d_out, d_out, 17, groups=d_out, bias=False)})
        self.mdl = nn.ModuleDict({"0": nn.ParameterDict({"g": torch.ones(1)}), "1": nn.Linear(d_in, d_out),
                                  "3": nn.ModuleDict({"sequential": nn.ModuleDict({"1": conv})})})
        self.look_ahead, self.dropout = look_ahead, nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, padding_BT: Tensor | None, state: dict[str, Tensor], name: str) -> Tensor:
        scale, linear, conv = self.mdl["0"]["g"], self.mdl["1"], self.mdl["3"]["sequential"]["1"]["conv"]
        rms_BT1 = x_BTD.norm(dim=-1, keepdim=True) / x_BTD.shape[-1] ** 0.5
        f_BTE, n = F.silu(linear(x_BTD / rms_BT1.clamp(min=1e-5) * scale), inplace=True), 16 - 2 * self.look_ahead
        f_BTE = with_last(f_BTE if padding_BT is None else f_BTE.masked_fill(padding_BT[..., None], 0), n, state, name)
        # As an image whose channels come last: five times as fast, and nothing is transposed.
        conv_BE1T = F.conv2d(f_BTE.mT[:, :, None], conv.weight[:, :, None], padding=(0, self.look_ahead),
                             groups=len(conv.weight))
        return self.dropout(f_BTE[:, n:] + conv_BE1T[:, :, 0].mT)


class MossFormerLayer(nn.Module):
    def __init__(self, dim: int, *, group_size: int = 256, query_key_dim: int = 128, expansion_factor: float = 4.0,
                 causal: bool = False, look_ahead: int = 8, dropout: float = 0.1):
        super().__init__()
        self.group_size, self.causal, s = group_size, causal, query_key_dim
        self.how = {"chunk_size": group_size, "causal": causal, "pooling": "sum" if causal else "mean"}
        self.rotary_pos_emb = nn.ParameterDict({"freqs": 1e4 ** -(torch.arange(16) / 16)}).requires_grad_(False)
        self.qk_offset_scale = nn.ParameterDict({"gamma": torch.randn(4, s) / 50, "beta": torch.zeros(4, s)})
        self.to_hidden, self.to_qk, self.to_out = (Project(*widths, look_ahead, dropout) for widths in (
            (dim, int(dim * expansion_factor)), (dim, s), (2 * dim, dim)))

    def forward(self, x_BTD: Tensor, padding_BT: Tensor | None = None, state: dict | None = None) -> Tensor:
        """padding_BT: True for padding behind rows. state: for parts of rows without look ahead; {}
        where a row begins. It gets what the next part needs."""
        here, ids_BT = {} if state is None else state, None if padding_BT is None else -padding_BT.long()
        moved, own = x_BTD.chunk(2, dim=-1)
        x_moved_BTD = torch.cat([with_last(moved, 1, here, "frame")[:, :-1], own], -1)
        vu_BTE = self.to_hidden(x_moved_BTD, padding_BT, here, "hidden")
        heads = self.make_heads(self.to_qk(x_moved_BTD, padding_BT, here, "qk"), here)
        attended_BTE = (chunk_attention(vu_BTE, heads, segment_ids_BT=ids_BT, **self.how) if state is None
                        else self.attend_part(vu_BTE, heads, state))
        (v, u), (a_v, a_u) = vu_BTE.chunk(2, dim=-1), attended_BTE.chunk(2, dim=-1)
        return x_BTD + self.to_out(a_u * v * torch.sigmoid(a_v * u), padding_BT, here, "out")

    def make_heads(self, z_BTS: Tensor, state: dict[str, Tensor]) -> list[Tensor]:
        """q and k of the quadratic, then of the linear half. RoPE turns pairs of neighbours."""
        gamma, beta = (self.qk_offset_scale[name][:, None, None] for name in ("gamma", "beta"))
        position_T = torch.arange(z_BTS.shape[1], device=z_BTS.device) + state.get("n_read", 0)
        state["n_read"], angle_TR = position_T[-1] + 1, position_T[:, None] * self.rotary_pos_emb["freqs"].double()
        pairs, rest = (z_BTS * gamma + beta).tensor_split([32], dim=-1)
        turned = torch.view_as_complex(pairs.unflatten(-1, (16, 2)).contiguous()) * torch.exp(1j * angle_TR)
        q_quad, q_lin, k_quad, k_lin = torch.cat([torch.view_as_real(turned).flatten(-2).to(rest.dtype), rest], -1)
        return [q_quad, k_quad, q_lin / self.group_size if self.causal else q_lin, k_lin]

    def attend_part(self, vu_BTE: Tensor, heads: list[Tensor], state: dict[str, Tensor]) -> Tensor:
        """Carried are a sum of k v over whole chunks, and all frames of the chunk that is open."""
        widths, new, c = [x.shape[2] for x in (vu_BTE, *heads)], torch.cat([vu_BTE, *heads], -1), self.group_size
        held = torch.cat([state.get("open", new[:, :0]), new], 1)
        n, whole = held.shape[1], held.shape[1] // c * c
        v, *heads = F.pad(held, [0, 0, 0, -n % c]).split(widths, -1)
        kv_BSE = state.get("kv", v.new_zeros(len(v), widths[1], widths[0]))
        out_BTE = chunk_attention(v, heads, exchange=CarriedState(kv_BSE, kv_BSE.new_zeros(len(v))), **self.how)
        state["kv"], state["open"] = kv_BSE + heads[3][:, :whole].mT @ v[:, :whole], held[:, whole:].clone()
        return out_BTE[:, n - new.shape[1] : n]


def main() -> float:
    """How far a row that is read in parts is from the whole row."""
    layer = MossFormerLayer(64, group_size=32, causal=True, look_ahead=0).eval()
    x, state = torch.randn(1, 1000, 64), {}
    change = (torch.cat([layer(part, state=state) for part in x.split(77, 1)], 1) - layer(x)).abs().max().item()
    print(f"parts differ from the whole by {change:.0e}")
    return change


if __name__ == "__main__":
    main()
