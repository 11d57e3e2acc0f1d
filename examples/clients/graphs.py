"""Graphs of torch_geometric on all devices: the label of a graph, and those of its nodes.

    python examples/clients/graphs.py
    python examples/clients/graphs.py --devices cpu:4

The batches of torch_geometric's DataLoader are divided by graph, which nothing has to be said of. Both losses are those
of one device: compute_average_loss counts what it gets, so a mean over nodes is one over the nodes of all devices.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphConv, global_mean_pool

import lockstep as ls


class Network(nn.Module):
    """Says of a graph whether it is a ring, and of each node whether it has two neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConv(1, 16), GraphConv(16, 16)
        self.of_graph, self.of_node = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores [graphs, 2] and [nodes, 2]."""
        nodes = self.first(batch.x, batch.edge_index).relu()
        nodes = self.second(nodes, batch.edge_index).relu()
        return self.of_graph(global_mean_pool(nodes, batch.batch, batch.num_graphs)), self.of_node(nodes)


def main() -> None:
    """Trains on rings and paths of 3 to 9 nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    args = parser.parse_args()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    model = strategy.mirror(Network())
    optimizer = strategy.mirror(torch.optim.Adam(model.parameters(), lr=1e-2))
    # 50 graphs in batches of 12: the last has 2, and a device may get none of them.
    batches = strategy.distribute_dataset(DataLoader(graphs(50), batch_size=12, shuffle=True))

    def step(batch: Batch) -> tuple[Tensor, Tensor]:
        of_graphs, of_nodes = batch.x.new_zeros(0), batch.x.new_zeros(0)
        if ls.has_rows(batch):
            scores, scores_of_nodes = model(batch)
            of_graphs = F.cross_entropy(scores, batch.y, reduction="none")
            of_nodes = F.cross_entropy(scores_of_nodes, batch.is_inside, reduction="none")
        # Two means: one over the graphs of all devices, and one over their nodes.
        graph_loss, node_loss = ls.compute_average_loss(of_graphs), ls.compute_average_loss(of_nodes)
        if ls.has_rows(batch):
            (graph_loss + node_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        return graph_loss.detach(), node_loss.detach()

    for epoch in range(20):
        sums = [strategy.reduce("sum", strategy.run(step, args=(batch,))) for batch in batches]
        if epoch % 5 == 4:
            graph_loss, node_loss = (sum(losses).item() / len(sums) for losses in zip(*sums, strict=True))
            print(f"epoch {epoch + 1}: loss of graphs {graph_loss:.4f}, of nodes {node_loss:.4f}")
    strategy.close()


def graphs(number: int) -> list[Data]:
    """Rings and paths in turn, of 3 to 9 nodes, with a number for each node."""
    random = torch.Generator().manual_seed(0)
    return [one(3 + index % 7, random, is_ring=index % 2 == 0) for index in range(number)]


def one(nodes: int, random: torch.Generator, *, is_ring: bool) -> Data:
    """A ring, or a path."""
    places = torch.arange(nodes)
    edges = torch.stack([places, (places + 1) % nodes])[:, : nodes if is_ring else nodes - 1]
    inside = torch.ones(nodes, dtype=torch.long)
    if not is_ring:
        inside[0] = inside[-1] = 0
    noise = 0.1 * torch.rand(nodes, 1, generator=random)
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    return Data(x=1 + noise, edge_index=edge_index, y=torch.tensor([int(is_ring)]), is_inside=inside)


if __name__ == "__main__":
    main()
