"""Trains a transformer encoder to classify sentences."""

# place: (?i)train\.py:(37|40)\b|\b(collate|loader|Encoder|blocks)\b
# cause: (?i)padd(ing|ed)|\bpads?\b
# remedy: (?i)(longest|max\w*).{0,40}(batch|in it)|dynamic(ally)?|bucket|group_by_length|similar length|nested|trim|shorter|unpad|packed|pack_padded|pad_sequence
# gain: 75 %

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

MAX_LENGTH = 128


class Encoder(nn.Module):
    def __init__(self, vocabulary=2000, size=96):
        super().__init__()
        self.words = nn.Embedding(vocabulary, size, padding_idx=0)
        self.positions = nn.Embedding(MAX_LENGTH, size)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(size, 4, 2 * size, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.head = nn.Linear(size, 3)

    def forward(self, ids):
        mask = ids == 0
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=mask)
        return self.head(x[:, 0])


def collate(samples):
    length = MAX_LENGTH
    if "fixed" in sys.argv:
        length = max(len(sentence) for sentence, _ in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    for row, (sentence, _) in zip(ids, samples):
        row[: len(sentence)] = sentence
    return ids, torch.tensor([label for _, label in samples])


torch.manual_seed(0)
lengths = torch.randint(6, 33, (512,)).tolist()
data = [(torch.randint(1, 2000, (n,)), n % 3) for n in lengths]
loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for epoch in range(2):
    for ids, labels in loader:
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
