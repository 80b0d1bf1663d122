"""GAU layers in a model of your own: texts of any length are packed into one row or padded, and get
the same labels.

    python examples/gau_in_your_model.py

The model tells lists of bytes in which a byte comes twice in a row from those in which none does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import GatedAttentionUnit

PAD = 0


class ByteClassifier(nn.Module):
    """Bytes to two classes: two bidirectional GAU layers in chunks of 16, then the mean over each
    document."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(GatedAttentionUnit(d_model=width, chunk_size=16, causal=False, query_key_dim=32,
                                                       init_std=0.1) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, bytes_BT: Tensor, token_mask_BT: Tensor) -> Tensor:
        """logits_B2. token_mask_BT: True for bytes, False for padding."""
        x_BTD = self.embed(bytes_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, token_mask=token_mask_BT)  # the norm and the residual are inside
        mask_BT1 = token_mask_BT[..., None]
        return self.head((x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1))

    def forward_packed(self, bytes_1T: Tensor, document_1T: Tensor) -> Tensor:
        """logits_N2 of N documents in one row. document_1T: 0, 0, ..., 1, 1, ...: no document sees
        another."""
        x_1TD = self.embed(bytes_1T)
        for layer in self.layers:
            x_1TD = layer(x_1TD, segment_ids=document_1T)
        member_NT = F.one_hot(document_1T[0]).T.to(x_1TD.dtype)
        return self.head(member_NT @ x_1TD[0] / member_NT.sum(1, keepdim=True))


def made(n: int, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """n lists of 10 to 60 bytes, and whether a byte comes twice in a row in them."""
    lists, labels = [], torch.randint(2, (n,), generator=generator)
    for label in labels.tolist():
        length = int(torch.randint(10, 61, (1,), generator=generator))
        steps = torch.randint(1, 16, (length,), generator=generator)  # never the byte before
        values = steps.cumsum(0) % 16
        if label:
            values[1::3] = values[0::3][: len(values[1::3])]
        lists.append(values + 1)
    return lists, labels


def padded(lists: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One row each, and the mask of what is no padding."""
    bytes_BT = nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=PAD)
    return bytes_BT, bytes_BT != PAD


def main() -> tuple[float, float]:
    """The share of right answers on new lists, and the largest change of a logit when a list is
    read alone."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = ByteClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        lists, labels_B = made(16, generator)
        loss = F.cross_entropy(model(*padded(lists)), labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    lists, labels_B = made(128, generator)
    with torch.no_grad():
        right = (model(*padded(lists)).argmax(1) == labels_B).float().mean().item()
        # A list among others, padded to the longest, has the logits that it has alone: padding
        # changes nothing.
        alone = torch.cat([model(each[None], torch.ones(1, len(each), dtype=torch.bool)) for each in lists[:8]])
        change = (model(*padded(lists))[:8] - alone).abs().max().item()
        # Packed into one row, no list sees another; where chunks begin is then the row's.
        number = torch.arange(8).repeat_interleave(torch.tensor([len(each) for each in lists[:8]]))
        packed = model.forward_packed(torch.cat(lists[:8])[None], number[None])
    print(f"{right:.0%} of 128 new lists are right; padding changes a logit by at most {change:.0e}; packed into one "
          f"row {(packed.argmax(1) == alone.argmax(1)).sum()} of 8 answers are the same")
    return right, change


if __name__ == "__main__":
    main()
