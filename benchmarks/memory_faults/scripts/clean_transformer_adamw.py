"""A small transformer is trained."""

import torch
from torch import nn

vocabulary, size = 256, 192
embedding = nn.Embedding(vocabulary, size)
layer = nn.TransformerEncoderLayer(size, 6, 4 * size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
head = nn.Linear(size, vocabulary)
model = nn.Sequential(embedding, encoder, head)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

losses = []
for _ in range(15):
    tokens = torch.randint(vocabulary, (4, 64))
    masked = tokens.masked_fill(torch.rand(4, 64) < 0.15, 0)
    loss = nn.functional.cross_entropy(model(masked).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
