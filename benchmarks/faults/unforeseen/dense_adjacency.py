"""Trains a graph convolutional network on the nodes of one graph."""

# place: (?i)train\.py:(21|53)\b|\b(convs?(\.\d)?|GraphConv)\b
# cause: (?i)dense.{0,60}(adjacency|matrix|graph|zeros)|(adjacency|adj|matrix).{0,60}(dense|zeros|sparse)|mostly zeros|(only )?[\d.]+ ?% (of \w+ )*(non-?zero|zeros)
# remedy: (?i)torch\.sparse|to_sparse|sparse (matrix|tensor|product|adjacency|multipl)|\bCSR\b|index_add|scatter_add|spmm|edge list
# gain: 75 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, adjacency):
        return adjacency @ self.linear(x)


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        sizes = [features, hidden, hidden, classes]
        self.convs = nn.ModuleList(GraphConv(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x, adjacency):
        for conv in self.convs[:-1]:
            x = F.relu(conv(x, adjacency))
        return self.convs[-1](x, adjacency)


torch.manual_seed(0)
nodes = 1500
edges = torch.randint(nodes, (2, nodes * 4))
adjacency = torch.eye(nodes)
adjacency[edges[0], edges[1]] = 1
adjacency[edges[1], edges[0]] = 1
scale = adjacency.sum(1).rsqrt()
adjacency = scale[:, None] * adjacency * scale
if "fixed" in sys.argv:
    adjacency = adjacency.to_sparse()
x = torch.randn(nodes, 512)
y = torch.randint(7, (nodes,))
train = torch.rand(nodes) < 0.3

model = GCN(512, 64, 7)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
for epoch in range(80):
    logits = model(x, adjacency)
    loss = F.cross_entropy(logits[train], y[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
